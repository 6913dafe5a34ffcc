"""Peak memory of a process that finds thresholds: a few histograms, not a copy of the surprisals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOKENS = 8_000_000  # 32 MB of surprisals

_PROGRAM = """
import sys, torch
from megatron_stare.stare import ReweightRule, surprisal_thresholds
from tests.stare.test_memory import TOKENS

def peak(reset=False):
    if reset:
        open("/proc/self/clear_refs", "w").write("5")  # the peak becomes what is resident now
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

def ours(surprisal, advantage, mask):
    surprisal_thresholds(surprisal, advantage, mask, ReweightRule.o1())

def topk(surprisal, advantage, mask):
    chosen = surprisal[mask & (advantage > 0)]
    chosen.topk(len(chosen) // 10)

torch.set_num_threads(1)
method = {"ours": ours, "topk": topk}[sys.argv[1]]
method(*[torch.ones(1000)] * 2, torch.ones(1000, dtype=torch.bool))  # loads what is loaded lazily
batch = [torch.rand(TOKENS), torch.randn(TOKENS), torch.ones(TOKENS, dtype=torch.bool)]
before = peak(reset=True)
method(*batch)
print(peak() - before)
"""


def added_megabytes(method: str) -> float:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _PROGRAM, method]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_thresholds_add_less_than_a_third_of_the_surprisals_to_the_peak() -> None:
    assert added_megabytes("topk") > 16  # this measurement does see a copy
    assert added_megabytes("ours") < 10
