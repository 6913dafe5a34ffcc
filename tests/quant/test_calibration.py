"""Rows of a dataset as token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stare.quant.calibration import MAX_TOKENS, built_in_texts, read_calibration
from megatron_stare.tasks.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '+' if m.role == 'user' else '=' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def decoded(tmp_path, source_of):
    """decoded(rows, samples, template): the texts calibrated on, and the held-out ones."""

    def read(rows: list[dict], samples: int = 128, template: str | None = None, source: Path | None = None):
        tokenizer = load_tokenizer(source_of("qwen3"))
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "model")
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = read_calibration(str(data), tmp_path / "model", samples)
        return [[tokenizer.decode(ids) for ids in part] for part in (found.samples, found.held_out)]

    return read


def test_rows_are_spread_over_the_dataset_and_some_held_out(decoded):
    rows = [{"prompt": f"{i:03d}="} for i in range(200)]
    samples, held_out = decoded(rows, samples=16)
    assert (len(samples), len(held_out)) == (16, 4)
    numbers = sorted(int(text[:-1]) for text in samples + held_out)
    assert numbers == list(range(0, 200, 10))
    assert not set(samples) & set(held_out)


def test_all_rows_of_a_small_dataset(decoded):
    samples, held_out = decoded([{"prompt": f"{i}="} for i in range(10)])
    assert (len(samples), len(held_out), len({*samples, *held_out})) == (6, 4, 10)
    samples, held_out = decoded([{"prompt": "1="}, {"prompt": "2="}])
    assert samples == held_out == ["1=", "2="]


def test_the_three_kinds_of_rows(decoded):
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    rows = [{"prompt": "5"}, {"prompt": messages[:1]}, {"messages": messages}, {"text": "7+8", "answer": 1}]
    samples, _ = decoded(rows, template=TEMPLATE)
    assert samples == ["+5=", "+1=", "+1=2", "7+8"]


def test_a_prompt_without_a_template_stands_as_it_is(decoded):
    assert decoded([{"prompt": "5+5"}])[0] == ["5+5"]


def test_long_rows_are_cut(decoded):
    samples, _ = decoded([{"text": "1" * 2000}])
    assert samples == ["1" * MAX_TOKENS]


def test_texts_to_compare_on_suit_the_vocabulary(tmp_path, source_of):
    for model in (source_of("qwen3"), tmp_path):  # the second has no tokenizer
        texts = built_in_texts(model, 16)
        assert len(texts) == 4 and all(len(ids) > 30 for ids in texts)
        assert all(0 <= i < 16 for ids in texts for i in ids)
