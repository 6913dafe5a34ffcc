"""Runs of the whole command for tests: their configs, their processes, what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_stare.report import read_metrics

slow = pytest.mark.skipif(
    "MEGATRON_STARE_SLOW" not in os.environ, reason="takes minutes; set MEGATRON_STARE_SLOW=1"
)


def write_config(root: Path, model: Path, **sections) -> Path:
    """A small RL run on the sums task; `sections` replace values a section."""
    values: dict = {
        "run": {"name": "test", "dir": str(root / "run"), "steps": 1000, "grace_seconds": 60},
        "model": {"path": str(model), "dtype": "float32", "vocab_multiple": 8},
        "parallel": {"tp": 2},
        "task": {
            "source": "megatron_stare.tasks.sums:sum_pairs",
            "size": 100,
            "chat_template": False,
            "max_prompt_tokens": 8,
            "reward": "megatron_stare.tasks.sums:reward",
        },
        "batch": {"prompts_per_step": 2, "responses_per_prompt": 4, "max_tokens_per_microbatch": 64},
        "optimizer": {"lr": 1e-3},
        "rollout": {"max_response_tokens": 6, "context_length": 64, "max_total_tokens": 4096},
        "checkpoint": {"every": 0},
        "report": {"tensorboard": False, "plot_every": 0},
    }
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(*arguments: str | Path) -> subprocess.Popen:
    """The command in its own session, as a terminal would start it."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_stare", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float = 200) -> tuple[int, str]:
    """Exit code and output; ends the process when it takes too long."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"not finished after {timeout} s:\n{output[-4000:]}")
    return process.returncode, output


def wait_for(condition, process: subprocess.Popen, timeout: float = 200) -> None:
    """Poll until `condition()`; fails when the process ends first or time is up."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"it did not come to that:\n{process.communicate()[0][-4000:]}")
        time.sleep(0.2)


def left_over(root: Path) -> list[str]:
    """Command lines of processes that still have to do with this test."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(root) in line and process.pid != os.getpid():
            found.append(line)
    return found


def steps_logged(root: Path) -> int:
    path = root / "run" / "metrics.jsonl"
    return len(read_metrics(path)) if path.exists() else 0
