"""Exports that are killed with SIGKILL at moments spread over their duration: `SOURCE DIRECTORY TIMES`.

Forks: an export of a tiny model takes a second, and starting Python with torch and transformers ten. Prints
one JSON object: {"seconds": of whole exports, "absent": times, "complete": times}; fails on anything else.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # threads do not survive a fork

import transformers  # noqa: F401 (loaded before the forks)

from megatron_stare.quant import export_fp8
from megatron_stare.quant.check import check_tensors
from megatron_stare.quant.source import open_checkpoint

FILES = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def export(source: Path, target: Path, verify: bool) -> int:
    """Start an export in a child; its process id."""
    child = os.fork()
    if child == 0:
        try:
            export_fp8(source, target, "fp8_blockwise", verify=verify)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        os._exit(1)
    return child


def main(source: Path, directory: Path, times: int) -> None:
    target = directory / "out"
    seconds = {}
    for verify in (True, False):
        started = time.monotonic()
        assert os.waitpid(export(source, directory / f"whole-{verify}", verify), 0)[1] == 0
        seconds[verify] = time.monotonic() - started
    found = {"seconds": seconds, "absent": 0, "complete": 0}
    for n in range(times):
        verify = n % 2 == 0  # with and without: writing is a small part of a checked export
        child = export(source, target, verify)
        time.sleep(seconds[verify] * (n + random.random()) / times)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if target.exists():
            assert {f.name for f in target.iterdir() if f.name != "generation_config.json"} == FILES
            check_tensors(open_checkpoint(source), target)
            target.rename(directory / f"complete-{n}")
            found["complete"] += 1
        else:
            found["absent"] += 1
    # What the killed ones left (out.tmp-*) is in nobody's way.
    assert os.waitpid(export(source, target, True), 0)[1] == 0
    check_tensors(open_checkpoint(source), target)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
