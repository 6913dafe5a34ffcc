from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.config.schema import TaskSection
from megatron_stare.errors import UserError
from megatron_stare.tasks import PromptCursor, PromptSource, open_source


def source_of(tokenizer: Any, size: int, **options: Any) -> PromptSource:
    return open_source(TaskSection(source="user_functions:rows", size=size, **options), tokenizer, 0)


def indices(cursor: PromptCursor, n: int) -> list[int]:
    return [prompt.index for prompt in cursor.next(n)]


def test_each_epoch_is_another_permutation_of_all_rows(tokenizer: Any) -> None:
    cursor = PromptCursor(source_of(tokenizer, 20), seed=5)
    epochs = [indices(cursor, 20) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_is_this_one_for_ever(tokenizer: Any) -> None:
    cursor = PromptCursor(source_of(tokenizer, 8), seed=0)
    assert indices(cursor, 8) == [0, 4, 5, 1, 2, 3, 6, 7]


def test_other_seeds_give_other_orders_and_no_shuffle_the_rows_own(tokenizer: Any) -> None:
    source = source_of(tokenizer, 20)
    assert indices(PromptCursor(source, seed=1), 20) != indices(PromptCursor(source, seed=2), 20)
    assert indices(PromptCursor(source, seed=1, shuffle=False), 25) == [*range(20), *range(5)]


@pytest.mark.parametrize("drawn", [0, 3, 7, 8, 20])
def test_a_resumed_cursor_draws_what_the_first_would_have_drawn(tokenizer: Any, drawn: int) -> None:
    cursor = PromptCursor(source_of(tokenizer, 7), seed=3)
    cursor.next(drawn)
    state = json.loads(json.dumps(cursor.state_dict()))
    resumed = PromptCursor(source_of(tokenizer, 7), seed=3)
    resumed.load_state_dict(state)
    assert resumed.next(30) == cursor.next(30)
    assert resumed.state_dict() == cursor.state_dict()


def test_a_changed_dataset_or_order_is_refused(tokenizer: Any) -> None:
    state = PromptCursor(source_of(tokenizer, 7), seed=3).state_dict()
    with pytest.raises(UserError, match="8 rows, but 7 when"):
        PromptCursor(source_of(tokenizer, 8), seed=3).load_state_dict(state)
    with pytest.raises(UserError, match="content is not what it was"):
        changed = source_of(tokenizer, 7, source_args={"word": "other"})
        PromptCursor(changed, seed=3).load_state_dict(state)
    with pytest.raises(UserError, match="seed=4, but the checkpoint with seed=3"):
        PromptCursor(source_of(tokenizer, 7), seed=4).load_state_dict(state)
    with pytest.raises(UserError, match="shuffle=False"):
        PromptCursor(source_of(tokenizer, 7), seed=3, shuffle=False).load_state_dict(state)


def test_overlong_prompts_are_passed_over(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "x" * (50 if i % 3 == 0 else 5), "answer": i} for i in range(9)]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = TaskSection(source=str(path), max_prompt_tokens=30, overlong="drop")
    cursor = PromptCursor(open_source(task, tokenizer, 0), seed=0)
    assert sorted(indices(cursor, 6)) == [1, 2, 4, 5, 7, 8]
    assert sorted(indices(cursor, 6)) == [1, 2, 4, 5, 7, 8]
