"""metrics.jsonl: one JSON object a step, the record from which plots and summaries are made."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Row = dict[str, Any]


def read_metrics(path: str | Path) -> list[Row]:
    """The steps recorded in a metrics.jsonl, in order; numbers that were not finite are None.

    A process that is killed while it writes leaves half a line: it is skipped with a warning.
    A missing file is an empty record.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows: list[Row] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row.get("step"), int):
                raise ValueError
        except (ValueError, AttributeError):
            logger.warning("%s:%d: not a metrics line, skipped", path, number)
            continue
        rows.append(row)
    return rows


def plain(value: Any) -> Any:
    """A JSON value: numbers and 0-dimensional tensors become int or float, not-finite ones None."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def values(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The finite numbers recorded under `key`, in order."""
    return [float(v) for row in rows if (v := row.get(key)) is not None]


class MetricsFile:
    """Appends steps to a metrics.jsonl; a line is in the file when `append` returns.

    Lines of `start_step` and later are removed first: a run that resumes at a checkpoint repeats them,
    and its step numbers must never go backwards. `rows` holds all steps, also those from before.

    A disk that is full does not end the run: what could not be written is logged, kept, and written by a
    later `append`.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        self.path = path
        found = read_metrics(path)
        self.rows: list[Row] = [row for row in found if row["step"] < start_step]
        if path.exists():
            aside = path.with_name(f"{path.name}.tmp")
            with aside.open("w", encoding="utf-8") as file:
                file.writelines(_line(row) for row in self.rows)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()
        self._waiting: list[Row] = []

    def append(self, row: Row) -> None:
        self.rows.append(row)
        self._waiting.append(row)
        data = "".join(map(_line, self._waiting)).encode()
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # half a line would spoil the next one
            logger.warning("%s: %d steps wait to be written: %s", self.path, len(self._waiting), error)
            return
        self._size += len(data)
        self._waiting = []

    def close(self) -> None:
        self._file.close()


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
