from __future__ import annotations

import time
from typing import Any

import pytest

from megatron_stare.config.schema import TaskSection
from megatron_stare.errors import UserError
from megatron_stare.tasks import check_reward
from megatron_stare.tasks.rewards import RewardCall, final_answer, make_reward


def score(name: str, response: str, answer: Any, source: str = "", **fields: Any) -> Any:
    values = {"prompt": "", "data_source": "", "extra": {}, "index": 0, "finish_reason": "stop"} | fields
    return make_reward(name, source, {})(RewardCall(response, answer, **values))


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("  12\n", "12"),
        ("12", 12),
        ("a  b\n c", "a b c"),
        ("so <answer> 12 </answer> it is", "12"),
        ("<answer>1</answer> no, <answer>12</answer>", "12"),
        ("<think><answer>5</answer> wait</think> 12", "12"),
        ("12", ["11", "12"]),
    ],
)
def test_exact_compares_the_final_answer_up_to_whitespace(response: str, answer: Any) -> None:
    assert score("exact", response, answer) == 1.0


@pytest.mark.parametrize(("response", "answer"), [("It is 12", "12"), ("A", "a"), ("", "12"), ("12.0", 12)])
def test_exact_forgives_nothing_else(response: str, answer: Any) -> None:
    assert score("exact", response, answer) == 0.0


def test_an_unclosed_answer_tag_leaves_the_text_whole() -> None:
    assert final_answer("<answer>12") == "<answer>12"


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("so the answer is 0.5", "1/2", 1.0),
        (r"Hence \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"\boxed{(1,2)}", "(1,2)", 1.0),
        ("7 + 5 = 12", 12, 1.0),
        (r"\boxed{B}", "A", 0.0),
        ("no idea", "3", 0.0),
        ("", "3", 0.0),
        (r"\boxed{4}", ["3", "4"], 1.0),
        (r"\boxed{4}", r"thus \boxed{4}", 1.0),
    ],
)
def test_math_is_equality_of_expressions(response: str, answer: Any, expected: float) -> None:
    assert score("math", response, answer) == expected


def test_math_works_outside_the_main_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(score, "math", "$\\frac{2}{4}$", "1/2").result() == 1.0


def test_a_row_whose_answer_is_no_mathematics_is_reported() -> None:
    with pytest.raises(ValueError, match="cannot read the answer ''"):
        score("math", "3", "")


@pytest.mark.parametrize("name", ["chain_sum", "basic_arithmetic", "leg_counting", "countdown", "gcd"])
def test_reasoning_gyms_own_scorer_gives_one_for_the_right_answer(name: str) -> None:
    from reasoning_gym import create_dataset

    source = f"reasoning_gym:{name}"
    entry = create_dataset(name, size=1, seed=4)[0]
    extra = {"reasoning_gym": entry}
    for text in (entry["answer"], f"I see.\n<answer>{entry['answer']}</answer>"):
        assert score("reasoning_gym", text, None, source, extra=extra) == 1.0
    assert score("reasoning_gym", "nothing", None, source, extra=extra) < 0.1


def test_rows_of_another_family_are_scored_by_that_familys_scorer() -> None:
    from reasoning_gym import create_dataset

    entry = create_dataset("leg_counting", size=1, seed=4)[0]
    extra = {"reasoning_gym": entry}
    assert score("reasoning_gym", entry["answer"], None, "reasoning_gym:chain_sum", extra=extra) == 1.0


@pytest.mark.parametrize("name", ["by_name", "by_place", "by_rest", "compute_score"])
def test_a_users_function_gets_what_its_parameters_ask_for(name: str) -> None:
    fields = {"prompt": "the prompt", "data_source": "gsm8k", "extra": {"level": 2, "extra_info": {"a": 1}}}
    expected = 0.5 if name == "by_place" else 1.0
    assert score(f"user_functions:{name}", "text", "answer", **fields) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("user_functions:unfillable", "fill its parameter 'judge'"),
        ("user_functions:misbehav", "did you mean 'misbehave'"),
        ("no_such_package:reward", "no module named 'no_such_package'"),
        ("exat", "did you mean 'exact'"),
    ],
)
def test_a_reward_that_cannot_be_used_is_explained_before_the_run(name: str, message: str) -> None:
    task = TaskSection.model_construct(reward=name, source="x:y", source_args={})
    with pytest.raises(UserError, match=message):
        check_reward(task)


def test_checking_a_reward_is_quick() -> None:
    started = time.monotonic()
    check_reward(TaskSection(source="x:y", reward="exact"))
    assert time.monotonic() - started < 1.0
