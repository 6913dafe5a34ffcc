"""Stands for a user's own module: sources and rewards named by import path in the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import Any

import numpy as np


def rows(size: int, seed: int, word: str = "row") -> list[dict[str, Any]]:
    return [{"prompt": f"{word} {seed} {i}", "answer": i, "level": i % 3} for i in range(size)]


def broken_rows(size: int, seed: int) -> list[Any]:
    return [{"prompt": "fine", "answer": 1}, ["not", "a", "dict"]]


def raising_rows(size: int, seed: int) -> list[Any]:
    raise RuntimeError("no connection\nto the catalogue")


NOT_A_FUNCTION = 3


def misbehave(response: str, answer: Any) -> Any:
    """The response says what the reward does."""
    print("the reward saw", response)
    match response:
        case "good":
            return 1
        case "hang":
            time.sleep(600)
        case "hang with the interpreter":
            re.fullmatch(r"(a|a)*b", "a" * 60)  # holds the GIL for years
        case "raise":
            raise ValueError(f"no verdict on {answer}")
        case "exit":
            sys.exit("enough")
        case "crash":
            os._exit(7)
        case "segfault":
            os.kill(os.getpid(), 11)
        case "hang with a child":
            child = subprocess.Popen(["sleep", "600"])
            with open(answer, "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        case "nan":
            return float("nan")
        case "none":
            return None
        case "text":
            return "1.0"
        case "numpy":
            return np.float32(0.5)
        case "bool":
            return True
        case "slow":
            time.sleep(0.3)
            return 0.25
    return 0.0


def by_name(*, extra: dict[str, Any], prompt: str, solution_str: str, ground_truth: str) -> float:
    return float((extra["level"], prompt, solution_str, ground_truth) == (2, "the prompt", "text", "answer"))


def by_place(text: str, truth: str, /, finish_reason: str, weight: float = 0.5) -> float:
    return weight * float(text == "text" and truth == "answer" and finish_reason == "stop")


def by_rest(response: str, **rest: Any) -> float:
    return float(set(rest) == {"answer", "prompt", "data_source", "extra", "index", "finish_reason"})


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(
        (data_source, solution_str, ground_truth, extra_info) == ("gsm8k", "text", "answer", {"a": 1})
    )


def unfillable(response: str, answer: Any, judge: Any) -> float:
    return 1.0
