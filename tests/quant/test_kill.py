"""Kill -9 during an export: the target is absent or complete, never in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("killed_exports.py")


def test_killed_exports_leave_nothing_half_done(tmp_path, make_source):
    source = make_source("llama", hidden=512, ffn=1024, layers=4, head_dim=128)
    (tmp_path / "results").mkdir()
    line = [sys.executable, str(SCRIPT), str(source), str(tmp_path / "results"), "10"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["absent"] + found["complete"] == 10
    assert found["absent"] >= 5, found  # the moments were during the exports, not after
