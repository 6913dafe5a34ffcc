"""Conversions that are killed with SIGKILL at moments spread over their duration: `SOURCE DIRECTORY TIMES`.

Forks: a conversion of a small model takes less time than starting Python with torch. Prints one JSON object,
{"absent": times, "complete": times, "abandoned": left-over directories seen}; fails on anything else.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint  # noqa: F401 (loaded before the forks)

from megatron_stare.weights.convert import plan_conversion
from megatron_stare.weights.inspect import inspect


def start(source: Path, target: Path) -> int:
    """Convert in a child process; its id."""
    child = os.fork()
    if child == 0:
        try:
            plan_conversion(source, target, workers=2).run()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        os._exit(1)
    return child


def kill(child: int) -> None:
    """Kill the converting process alone; its workers have to notice."""
    workers = psutil.Process(child).children(recursive=True)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not psutil.wait_procs(workers, timeout=10)[1], "workers live on"


def left(target: Path) -> list[Path]:
    """Directories of killed conversions."""
    return [path for path in target.parent.glob(f"{target.name}.*")]


def study(source: Path, target: Path, times: int) -> dict[str, int]:
    """Kill `times` conversions; afterwards one that is left alone succeeds and leaves `target` only."""
    begin = time.monotonic()
    assert os.waitpid(start(source, target), 0)[1] == 0
    seconds = time.monotonic() - begin
    found = {"absent": 0, "complete": 0, "abandoned": 0}
    for n in range(times):
        shutil.rmtree(target, ignore_errors=True)
        child = start(source, target)
        time.sleep(seconds * (n + random.random()) / times)
        kill(child)
        found["abandoned"] += bool(left(target))
        if target.exists():
            assert inspect(target, check_values=True).passed
        found["complete" if target.exists() else "absent"] += 1
    shutil.rmtree(target, ignore_errors=True)
    assert os.waitpid(start(source, target), 0)[1] == 0
    assert inspect(target, check_values=True).passed
    assert not left(target), f"not removed: {left(target)}"
    return found


def main(source: Path, directory: Path, times: int) -> None:
    """Both directions."""
    torch.set_num_threads(1)  # threads do not survive a fork
    to_megatron = study(source, directory / "megatron", times)
    print(json.dumps([to_megatron, study(directory / "megatron", directory / "hf", times)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
