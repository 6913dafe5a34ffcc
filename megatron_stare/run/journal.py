"""RUN/journal: each step's rollouts, so that none is sampled again, and any step can be replayed.

One safetensors file a step: token ids int32, log-probs float32, rewards float64, all flat, with lengths.
What is not a tensor is JSON in the header. A file that is cut off, damaged or of another run is no error:
its step is sampled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megatron_stare.tasks.sample import Group, Prompt, Response

_FORMAT = "1"
_NAME = re.compile(r"step_(\d{7})\.safetensors")
_REASONS = ("stop", "length", "abort")


@dataclass
class Rollouts:
    """What sampling gave for one step.

    `figures`: what it cost, for the log. `source`: the state of the prompts' cursor after it.
    """

    groups: list[Group]
    figures: dict[str, float]
    source: dict[str, Any]


class Journal:
    """Rollouts by step.

    Args:
        directory: made at the first write.
        binding: the values that decide what a run learns; entries of a run with others are not used.
        on_problem: told in a sentence what could not be written or read.
    """

    def __init__(
        self, directory: Path, binding: Mapping[str, Any], on_problem: Callable[[str], None]
    ) -> None:
        self._directory, self._on_problem = directory, on_problem
        self._run = hashlib.sha256(json.dumps(binding, sort_keys=True).encode()).hexdigest()

    def write(self, step: int, rollouts: Rollouts) -> None:
        """Keep a step's rollouts. A disk that is full costs the entry, not the run."""
        tensors = _flatten(rollouts.groups)
        header = {
            "format": _FORMAT,
            "run": self._run,
            "step": str(step),
            "checksum": _checksum(tensors),
            "figures": json.dumps(rollouts.figures),
            "source": json.dumps(rollouts.source),
            "reward_errors": json.dumps(_reward_errors(rollouts.groups)),
        }
        path = self._path(step)
        aside = path.with_suffix(".tmp")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                file.write(save(tensors, metadata=header))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            self._on_problem(f"the rollouts of step {step} could not be kept: {error}")

    def read(self, step: int) -> Rollouts | None:
        """A step's rollouts; None where there are none that can be used. Texts are left empty."""
        path = self._path(step)
        if not path.exists():
            return None
        try:
            with safe_open(path, "np") as file:
                header = file.metadata() or {}
                if header.get("format") != _FORMAT:
                    raise ValueError(f"has format {header.get('format')}, not {_FORMAT}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if header["step"] != str(step) or header["checksum"] != _checksum(tensors):
                raise ValueError("does not hold what was written")
            if header["run"] != self._run:
                raise ValueError("comes from another run or another config")
            groups = _unflatten(tensors, json.loads(header["reward_errors"]))
            return Rollouts(groups, json.loads(header["figures"]), json.loads(header["source"]))
        except (OSError, SafetensorError, ValueError, KeyError, IndexError, TypeError) as error:
            self._on_problem(f"{path} is not used, its step is sampled again: {error}")
            return None

    def forget_before(self, step: int) -> None:
        """Delete the entries of earlier steps, which no checkpoint leads to any more."""
        with contextlib.suppress(OSError):
            for path in list(self._directory.iterdir()):
                match = _NAME.fullmatch(path.name)
                if (match and int(match[1]) < step) or path.suffix == ".tmp":
                    path.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step:07d}.safetensors"


def _flatten(groups: list[Group]) -> dict[str, np.ndarray]:
    prompts = [group.prompt for group in groups]
    responses = [response for group in groups for response in group.responses]

    def flat(rows: list[list], dtype: str) -> np.ndarray:
        return np.array([value for row in rows for value in row], dtype=dtype)

    return {
        "prompt_index": np.array([prompt.index for prompt in prompts], dtype="int64"),
        "prompt_lengths": np.array([len(prompt.token_ids) for prompt in prompts], dtype="int32"),
        "prompt_ids": flat([prompt.token_ids for prompt in prompts], "int32"),
        "group_sizes": np.array([len(group.responses) for group in groups], dtype="int32"),
        "response_lengths": np.array([len(r.token_ids) for r in responses], dtype="int32"),
        "response_ids": flat([r.token_ids for r in responses], "int32"),
        "log_probs": flat([r.log_probs for r in responses], "float32"),
        "rewards": np.array([r.reward for r in responses], dtype="float64"),
        "weight_versions": np.array([r.weight_version for r in responses], dtype="int32"),
        "finish_reasons": np.array([_REASONS.index(r.finish_reason) for r in responses], dtype="uint8"),
    }


def _unflatten(tensors: Mapping[str, np.ndarray], reward_errors: Mapping[str, str]) -> list[Group]:
    prompt_ids = _rows(tensors["prompt_ids"], tensors["prompt_lengths"])
    response_ids = _rows(tensors["response_ids"], tensors["response_lengths"])
    log_probs = _rows(tensors["log_probs"], tensors["response_lengths"])
    responses = [
        Response(
            token_ids=ids,
            log_probs=logs,
            finish_reason=_REASONS[tensors["finish_reasons"][i]],
            weight_version=int(tensors["weight_versions"][i]),
            reward=float(tensors["rewards"][i]),
            reward_error=reward_errors.get(str(i)),
        )
        for i, (ids, logs) in enumerate(zip(response_ids, log_probs, strict=True))
    ]
    groups, start = [], 0
    for index, ids, size in zip(tensors["prompt_index"], prompt_ids, tensors["group_sizes"], strict=True):
        prompt = Prompt(index=int(index), token_ids=ids, text="", answer=None)
        groups.append(Group(prompt, responses[start : start + int(size)]))
        start += int(size)
    return groups


def _rows(flat: np.ndarray, lengths: np.ndarray) -> list[list]:
    ends = np.cumsum(lengths)
    return [flat[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


def _reward_errors(groups: list[Group]) -> dict[str, str]:
    responses = (response for group in groups for response in group.responses)
    return {str(i): r.reward_error for i, r in enumerate(responses) if r.reward_error is not None}


def _checksum(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name}/{tensors[name].dtype}/{tensors[name].shape}/".encode())
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()
