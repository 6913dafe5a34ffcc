"""Reads a run directory for `megatron-stare status`; where files are missing or damaged, what is left."""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from megatron_stare.errors import UserError
from megatron_stare.report.status import LIVING, NodeStatus, RunStatus
from megatron_stare.run.files import RunFiles

# A supervisor renews its record every 2 s; a busy file system may need longer.
SILENT_SECONDS = 60.0
_RECENT_STEPS = 32
_SHOWN_PROBLEMS = 3
_TABLE_WIDTH = 110
_CHECKPOINT = re.compile(r"step_(\d{7})")
# Of metrics.jsonl and problems.jsonl only the end is read: both grow for weeks.
_TAIL_BYTES = 1 << 18


def show_status(directory: Path, as_json: bool) -> int:
    """Print the status of the run in `directory`. Returns 0 if it is well, 1 if it failed or is dead.

    Raises UserError where no run is.
    """
    status = read_status(directory)
    if as_json:
        print(json.dumps(asdict(status), indent=2))
    else:
        from rich.console import Console

        from megatron_stare.report.status import print_status

        # A narrow terminal breaks lines; a table would rather break its words.
        print_status(status, Console(file=sys.stdout, width=max(_TABLE_WIDTH, Console().width)))
    return 0 if status.well else 1


def read_status(directory: Path) -> RunStatus:
    """What the files of a run tell. Raises UserError where no run is."""
    files = RunFiles(directory.absolute())
    traces = (files.config, files.metrics, files.nodes, files.checkpoints, files.outcome, files.progress)
    if not any(path.exists() for path in traces):
        raise UserError(f"{directory}: no run is there; name a run directory, as runs/NAME")
    now = time.time()
    damaged: list[str] = []
    nodes, job = _nodes(files, now, damaged)
    progress = _read_object(files.progress, damaged)
    outcome = _read_object(files.outcome, damaged)
    rows = _tail(files.metrics)
    state, message = _state(nodes, outcome)
    problems = [entry for entry in _tail(files.problems) if _is_problem(entry)]
    alive = state in LIVING
    return RunStatus(
        run=str(files.root),
        state=state,
        message=message,
        job=job,
        started=min((node.started for node in nodes if node.started is not None), default=None),
        steps=_steps(progress, rows),
        of=_whole(progress.get("of")),
        phase=_text(progress.get("phase")) if alive else None,
        phase_seconds=_age(progress.get("phase_since"), now) if alive else None,
        step_seconds=_step_seconds(rows, progress),
        nodes=nodes,
        checkpoints=_checkpoints(files, now),
        problems=problems[-_SHOWN_PROBLEMS:],
        problem_count=_count_lines(files.problems),
        damaged=damaged,
    )


def _state(nodes: list[NodeStatus], outcome: dict[str, Any]) -> tuple[str, str]:
    """The state of the run and a sentence about it: the head's word, if it could still say one."""
    head = next((node for node in nodes if node.node == 0), None)
    ended, message = _text(outcome.get("outcome")), _text(outcome.get("message")) or ""
    if head is None or head.state == "unknown":
        return (ended, message) if ended else ("unknown", "no supervisor has written yet")
    if head.state not in LIVING:
        return head.state, head.message or message
    if head.alive:
        silent = [str(node.node) for node in nodes if node.state in LIVING and not node.alive]
        return head.state, f"no sign of life from node {', '.join(silent)}" if silent else ""
    if ended:
        return ended, message
    last = "" if head.silent is None else f" for {head.silent:.0f} s"
    return "dead", f"no sign of life from process {head.pid} on {head.host}{last}"


def _nodes(files: RunFiles, now: float, damaged: list[str]) -> tuple[list[NodeStatus], str | None]:
    """The nodes of the job that used the directory last."""
    found: list[tuple[float, str, NodeStatus]] = []
    with contextlib.suppress(OSError):
        for path in sorted(files.nodes.iterdir()):
            if path.suffix != ".json" or not path.stem.isdecimal():
                continue
            record = _read_object(path, damaged)
            node = _node(int(path.stem), record, now)
            found.append((node.started or 0.0, _text(record.get("job")) or "", node))
    if not found:
        return [], None
    # A job on fewer nodes leaves the records of one on more behind.
    job = next((job for _, job, node in found if node.node == 0 and job), None) or max(found, key=_first)[1]
    return sorted((node for _, of, node in found if of == job), key=lambda node: node.node), job or None


def _first(entry: tuple[float, str, NodeStatus]) -> float:
    return entry[0]


def _node(number: int, record: dict[str, Any], now: float) -> NodeStatus:
    host, pid = _text(record.get("host")) or "?", _whole(record.get("pid"))
    silent = _age(record.get("heartbeat"), now)
    alive = silent is not None and silent <= SILENT_SECONDS
    if alive and pid and host == socket.gethostname():
        alive = psutil.pid_exists(pid)
    return NodeStatus(
        node=number,
        host=host,
        pid=pid,
        state=_text(record.get("state")) or "unknown",
        started=_number(record.get("started")),
        silent=silent,
        alive=alive,
        children=_counts(record.get("children")),
        restarts=_counts(record.get("restarts")),
        message=_text(record.get("message")) or "",
    )


def _steps(progress: dict[str, Any], rows: list[dict[str, Any]]) -> int:
    steps = _whole(progress.get("steps"))
    if steps is not None:
        return steps
    return max((step + 1 for row in rows if (step := _whole(row.get("step"))) is not None), default=0)


def _step_seconds(rows: list[dict[str, Any]], progress: dict[str, Any]) -> float | None:
    seconds = [value for row in rows if (value := _number(row.get("time/step"))) is not None]
    if seconds:
        return statistics.median(seconds[-_RECENT_STEPS:])
    return _number(progress.get("median_step"))


def _checkpoints(files: RunFiles, now: float) -> list[tuple[int, float]]:
    """Those that were published; whether they are whole is judged when one is loaded."""
    found = []
    with contextlib.suppress(OSError):
        for path in files.checkpoints.iterdir():
            with contextlib.suppress(OSError):
                if (name := _CHECKPOINT.fullmatch(path.name)) and path.is_dir():
                    found.append((int(name[1]), max(0.0, now - path.stat().st_mtime)))
    return sorted(found)


def _read_object(path: Path, damaged: list[str]) -> dict[str, Any]:
    """A JSON object; empty where there is none. Files that are no such thing are noted in `damaged`."""
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        pass
    damaged.append(path.name)
    return {}


def _tail(path: Path) -> list[dict[str, Any]]:
    """The JSON objects on a file's last lines; what else stands there is passed over."""
    found = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    found.append(entry)
    return found


def _is_problem(entry: dict[str, Any]) -> bool:
    texts = (entry.get("source"), entry.get("message"))
    return _number(entry.get("time")) is not None and all(isinstance(text, str) for text in texts)


def _count_lines(path: Path) -> int:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    return 0


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with contextlib.suppress(OverflowError):
        # Later than the year 9999, or before 1970, is no time and no duration.
        if math.isfinite(value) and 0 <= value < 253_402_300_800:
            return float(value)
    return None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _age(value: Any, now: float) -> float | None:
    since = _number(value)
    return None if since is None else max(0.0, now - since)


def _counts(value: Any) -> dict[str, int]:
    """Whole numbers by name; a number alone is that of the trainer."""
    if isinstance(value, dict):
        return {str(name): count for name, item in value.items() if (count := _whole(item)) is not None}
    count = _whole(value)
    return {} if count is None else {"trainer": count}
