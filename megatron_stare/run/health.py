"""Signs of life: what the trainer writes of its progress, what the supervisor concludes from it."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_stare.config.schema import RunSection

_RECENT_STEPS = 32


@dataclass
class Progress:
    """How far the trainer is, as RUN/progress.json holds it. Times are seconds since 1970.

    `start`: steps that were finished when these ranks began; `attempt` counts their restarts under one
    torchrun; `median_step` is of the last steps, None before the first; `pid` is rank 0's.
    """

    steps: int
    of: int
    start: int
    attempt: int
    pid: int
    phase: str = "starting"
    phase_since: float = 0.0
    step_since: float = 0.0
    median_step: float | None = None
    time: float = 0.0


class Pulse:
    """Writes the progress file, on rank 0, at every change of phase and after every step.

    A disk that is full must not end the run: what cannot be written is left out.
    """

    def __init__(self, path: Path, steps: int, of: int) -> None:
        self._path = path
        self._durations: deque[float] = deque(maxlen=_RECENT_STEPS)
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        now = time.time()
        self._state = Progress(steps, of, steps, attempt, os.getpid(), phase_since=now, step_since=now)
        self._write()

    def phase(self, phase: str) -> None:
        """What is being done now."""
        self._state.phase, self._state.phase_since = phase, time.time()
        self._write()

    def step(self, steps: int) -> None:
        """So many steps are finished."""
        now = time.time()
        self._durations.append(now - self._state.step_since)
        self._state.steps, self._state.step_since = steps, now
        self._state.median_step = statistics.median(self._durations)
        self._write()

    def _write(self) -> None:
        self._state.time = time.time()
        replace_json(self._path, asdict(self._state))


class Watchdog:
    """Finds that the trainer hangs: a step that takes many times as long as its predecessors did."""

    def __init__(self, run: RunSection, path: Path) -> None:
        self._run, self._path = run, path
        self.restarted()

    def restarted(self) -> None:
        """The ranks were started (again): the clock starts anew."""
        self._since = time.time()

    def overdue(self) -> str | None:
        """A sentence about the hang; None while all is well."""
        progress = read_progress(self._path)
        since = max(self._since, progress.step_since if progress else 0.0)
        median = progress.median_step if progress else None
        limit = max(self._run.hang_seconds, self._run.hang_factor * (median or 0.0))
        waited = time.time() - since
        if waited <= limit:
            return None
        doing = f"{progress.phase} since {time.time() - progress.phase_since:.0f} s" if progress else "silent"
        return f"no step was finished for {waited:.0f} s (limit {limit:.0f} s); the trainer is {doing}"


class Restarts:
    """Whether ranks that failed are started again.

    torchrun does so `limit` times by itself. When it has given up, or was killed, it is started anew if steps
    were finished meanwhile; else at most `limit` times in a row.
    """

    def __init__(self, limit: int, path: Path) -> None:
        self._limit, self._path = limit, path
        self._steps = self._in_a_row = 0
        self.total = 0

    def allowed(self) -> bool:
        """Asked when the ranks have ended in failure; True counts as a restart."""
        progress = read_progress(self._path)
        steps = progress.steps if progress else 0
        if steps > self._steps:
            self._steps, self._in_a_row = steps, 0
        if self._in_a_row >= self._limit:
            return False
        self._in_a_row += 1
        self.total += 1
        return True


def read_progress(path: Path) -> Progress | None:
    """What rank 0 wrote last; None where there is nothing to be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Progress(**json.loads(path.read_text(encoding="utf-8")))
    return None


def replace_json(path: Path, content: Any) -> None:
    """Write atomically; readers never see half a file. Errors of the disk are passed over."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(json.dumps(content), encoding="utf-8")
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
