"""RUN/problems.jsonl: what went wrong, for `megatron-stare status` and for whoever asks afterwards."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def record_problem(path: Path, source: str, message: str) -> None:
    """Append a problem of `source` (trainer, server-0, checkpoint, ...) and say it on standard output.

    There, because that is what a rank leaves to the person who watches; its standard error is in its log.

    Never raises: a full disk must not turn a survived problem into a fatal one.
    """
    print(f"warning: {source}: {message}", flush=True)
    entry = {"time": time.time(), "host": socket.gethostname(), "source": source, "message": message}
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
        # One write of one line: processes of several nodes append to the same file.
        file.write(json.dumps(entry) + "\n")


def recorder(path: Path, source: str, rank: int) -> Callable[[str], None]:
    """Records the problems of `source` on rank 0 alone: all ranks see the same ones."""
    return partial(record_problem, path, source) if rank == 0 else lambda _message: None


def read_problems(path: Path) -> list[dict[str, Any]]:
    """All problems, oldest first; lines cut off by a crash are passed over."""
    problems = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and {"time", "source", "message"} <= entry.keys():
                    problems.append(entry)
    return problems
