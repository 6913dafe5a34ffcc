"""What a response is worth: the rewards that `task.reward` can name.

A reward is a function of one response. It runs in a worker process (see
reward_pool.py), so it may be slow, raise, hang or crash.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_stare.errors import UserError
from megatron_stare.tasks.lookup import import_function, is_function_path, nearest
from megatron_stare.tasks.rows import GYM_ENTRY, GYM_PREFIX, create_gym


@dataclass(frozen=True, slots=True)
class RewardCall:
    """What a reward may look at: one response and its prompt's row (fields as in Prompt and Response)."""

    response: str
    answer: Any
    prompt: str
    data_source: str
    extra: dict[str, Any]
    index: int
    finish_reason: str


Reward = Callable[[RewardCall], Any]

_PARAMETERS: dict[str, Callable[[RewardCall], Any]] = {
    "response": lambda call: call.response,
    "response_text": lambda call: call.response,
    "answer": lambda call: call.answer,
    "prompt": lambda call: call.prompt,
    "data_source": lambda call: call.data_source,
    "extra": lambda call: call.extra,
    "index": lambda call: call.index,
    "finish_reason": lambda call: call.finish_reason,
    # verl's names, so that its reward functions work unchanged.
    "solution_str": lambda call: call.response,
    "ground_truth": lambda call: call.answer,
    "extra_info": lambda call: call.extra.get("extra_info", call.extra),
}


def make_reward(name: str, source: str, source_args: dict[str, Any]) -> Reward:
    """The reward that `task.reward` names. `source` and its arguments are for reasoning-gym's scorers.

    Raises:
        UserError: no such reward, or a user's function that cannot be imported or called.
    """
    if name == "exact":
        return exact
    if name == "math":
        import math_verify  # noqa: F401  loaded now, not within the first call's time limit

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
        return math_equal
    if name == "reasoning_gym":
        if not source.startswith(GYM_PREFIX):
            raise UserError(f"task.reward=reasoning_gym needs task.source={GYM_PREFIX}NAME, not {source}")
        gym_name = source.removeprefix(GYM_PREFIX)
        dataset = create_gym(gym_name, 1, 0, source_args)
        return functools.partial(_gym_score, gym_name, dataset)
    if is_function_path(name):
        return user_reward(import_function(name, "task.reward"), name)
    built_in = ("exact", "math", "reasoning_gym")
    raise UserError(
        f"task.reward={name}: not one of {', '.join(built_in)} or package.module:function"
        f"{nearest(name, built_in)}"
    )


def final_answer(response: str) -> str:
    """What a response gives as its answer.

    What follows the last </think> counts, if there is one; in it the content of the last <answer>…</answer>,
    or all of it where there are no such tags. Whitespace around it is removed.
    """
    response = response.rpartition("</think>")[2]
    start = response.rfind("<answer>")
    if start >= 0:
        end = response.find("</answer>", start)
        if end >= 0:
            return response[start + len("<answer>") : end].strip()
    return response.strip()


def exact(call: RewardCall) -> float:
    """1.0 if the final answer is the row's answer, else 0.0.

    Both are compared as text with whitespace stripped at the ends and every run of it inside made one space;
    case and everything else count. If the row's answer is a list, one of its members has to match.
    """
    answers = call.answer if isinstance(call.answer, list | tuple) else [call.answer]
    given = " ".join(final_answer(call.response).split())
    return float(any(given == " ".join(str(answer).split()) for answer in answers))


def math_equal(call: RewardCall) -> float:
    """1.0 if math-verify finds the response mathematically equal to the row's answer, else 0.0.

    All of the response after </think> is searched as math-verify does: boxed and LaTeX expressions come
    first, plain numbers last. If the row's answer is a list, one of its members has to match.

    Raises:
        ValueError: the row's answer is no mathematics.
    """
    from math_verify import parse, verify

    # Its own time limits are signals, and where these do not work everything is unequal: the pool limits it.
    given = parse(call.response.rpartition("</think>")[2], parsing_timeout=None)
    if not given:
        return 0.0
    answers = call.answer if isinstance(call.answer, list | tuple) else [call.answer]
    return float(any(verify(_gold(str(answer)), given, timeout_seconds=None) for answer in answers))


def user_reward(function: Callable[..., Any], path: str) -> Reward:
    """Call a user's function with what its parameters ask for.

    A parameter is filled by its name: `response` (or `response_text`, `solution_str`), `answer` (or
    `ground_truth`), `prompt` (the text given to the model), `data_source`, `extra` (the row's other columns),
    `extra_info` (that column, as in verl), `index`, `finish_reason`. Parameters of other names without a
    default take the response and the answer, in this order, where these are not asked for by name. `**kwargs`
    receives whichever of response, answer, prompt, data_source, extra, index and finish_reason is not named.
    The function returns a number.

    Raises:
        UserError: a parameter that nothing fills.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise UserError(f"task.reward={path}: its parameters cannot be read: {error}") from error
    named = {parameter.name for parameter in parameters}
    spare = [
        name
        for name, names in (
            ("response", {"response", "response_text", "solution_str"}),
            ("answer", {"answer", "ground_truth"}),
        )
        if not names & named
    ]
    positional: list[Callable[[RewardCall], Any]] = []
    keywords: dict[str, Callable[[RewardCall], Any]] = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = ("response", "answer", "prompt", "data_source", "extra", "index", "finish_reason")
            keywords |= {name: _PARAMETERS[name] for name in rest if name not in named}
            continue
        get = _PARAMETERS.get(parameter.name)
        if get is None:
            if parameter.default is not parameter.empty:
                continue
            if not spare:
                raise UserError(
                    f"task.reward={path}: nothing is known to fill its parameter {parameter.name!r} with "
                    f"(known: {', '.join(_PARAMETERS)})"
                )
            get = _PARAMETERS[spare.pop(0)]
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(get)
        else:
            keywords[parameter.name] = get

    def reward(call: RewardCall) -> Any:
        named_values = {name: get(call) for name, get in keywords.items()}
        return function(*[get(call) for get in positional], **named_values)

    return reward


def as_number(value: Any) -> float:
    """A reward's result as a float. A number of NumPy or PyTorch (one element) counts as a number.

    Raises:
        TypeError, ValueError: not a number, or not a finite one.
    """
    if not isinstance(value, int | float) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float):
        raise TypeError(f"the reward is a {type(value).__name__}, not a number")
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return float(value)


@functools.lru_cache(maxsize=4096)
def _gold(answer: str) -> Any:
    from math_verify import parse

    # Bare answers such as "(1,2)" or "A" are read as mathematics only inside a box.
    gold = parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the answer {answer!r}")
    return gold


def _gym_score(name: str, dataset: Any, call: RewardCall) -> Any:
    """reasoning-gym's own score of the final answer, 0 to 1; several families value near misses too."""
    entry = call.extra.get(GYM_ENTRY)
    if entry is None:
        raise ValueError("not a row of reasoning-gym")
    family = entry.get("metadata", {}).get("source_dataset", name)
    # A scorer may depend on its dataset's arguments; rows of another family (an evaluation's) use defaults.
    score = dataset.score_answer if name in (family, "composite") else _gym_scorer(family)
    return score(answer=final_answer(call.response), entry=entry)


@functools.cache
def _gym_scorer(family: str) -> Callable[..., Any]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(family)
