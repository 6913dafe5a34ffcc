"""Runs a function on real processes that share a gloo group, with a time limit."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_stare.run.worker import leave

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(target: str, world_size: int, arguments: dict[str, Any], timeout: float = 240.0) -> list[Any]:
    """Call `target` ("package.module:function") with `arguments` on every rank; what each rank returned.

    Arguments and results travel as JSON. Raises AssertionError with a rank's output when it failed, and
    ends all ranks when the time is over.
    """
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.support.ranks", target, json.dumps(arguments)]
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (rank, (out, err)) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, f"rank {number} of {target} failed:\n{out[-2000:]}\n{err[-6000:]}"
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def main() -> None:
    """Entry of a rank."""
    module, function = sys.argv[1].split(":")
    result = getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))
    print(json.dumps(result), flush=True)
    leave(0)


if __name__ == "__main__":
    main()
