"""The example for TRL runs as a user runs it, steers, and stays short. Needs trl, which is an extra."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trl_stare.py"


def test_the_example_is_under_sixty_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed (an extra)")
def test_the_example_trains_offline_and_reports_each_step() -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(EXAMPLE), "45"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"step (\d+)  entropy ([\d.]+)  W ([\d.]+)  reward ([\d.]+)", done.stdout)
    assert [int(step) for step, *_ in lines] == list(range(45))
    entropy, W, reward = ([float(line[i]) for line in lines] for i in (1, 2, 3))
    assert W[:4] == [1.0] * 4  # the target is being measured, then entropy is above it
    assert entropy[-1] < entropy[0] and max(W) > 1.05  # entropy fell under the target and is pushed up
    assert sum(reward[-5:]) > sum(reward[:5])  # it learns
