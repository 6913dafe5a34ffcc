"""What a person sees while a run runs: a live line and a bar on a terminal, else a line a step."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections import deque
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_stare.report.metrics import Row

_SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("entropy", "entropy", ".3f"),
    ("loss", "loss", ".4g"),
    ("grad_norm", "grad norm", ".3g"),
)


class Clock:
    """Seconds of a step, and what is left of the run, from the steps of late."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self._recent: deque[float] = deque(maxlen=20)
        self._last = time.monotonic()

    def tick(self) -> float:
        """Seconds since the last tick."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._recent.append(seconds)
        return seconds

    def left(self, steps_done: int) -> float | None:
        """Seconds until the last step, or None before the first."""
        if not self._recent:
            return None
        recent = sorted(self._recent)
        return recent[len(recent) // 2] * max(0, self.total_steps - steps_done)


def duration(seconds: float | None) -> str:
    """`42s`, `3m07s`, `2h05m`, `3d04h`; `-` for None."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    for unit, lower, size, lower_size in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // lower_size:02d}{lower}"
    return f"{whole}s"


def describe_step(row: Row) -> str:
    """The figures of a step that a person watches, in one line."""
    parts = [f"{label} {_number(row[key], form)}" for key, label, form in _SHOWN if key in row]
    if "stare/W" in row:
        gate = "" if (is_open := row.get("stare/open")) is None else " open" if is_open else " closed"
        parts.append(f"W {_number(row['stare/W'], '.3g')}{gate}")
    if row.get("reward/errors"):
        parts.append(f"reward errors {row['reward/errors']:g}")
    parts += [f"{key} {_number(row[key], '.4g')}" for key in row if key.startswith("eval/")]
    return "  ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "nan" if value is None or not math.isfinite(value) else format(value, form)


class PlainConsole:
    """One line a step, for logs and pipes."""

    def __init__(self, clock: Clock, stream: TextIO) -> None:
        self._clock = clock
        self._stream = stream

    def step(self, row: Row, seconds: float) -> None:
        done, total = row["step"] + 1, self._clock.total_steps
        left = duration(self._clock.left(done))
        print(
            f"step {done}/{total}  {describe_step(row)}  {seconds:.1f}s  left {left}",
            file=self._stream,
            flush=True,
        )

    def status(self, phase: str) -> None:
        """Phases last seconds; in a log they would be noise."""

    def close(self) -> None: ...


class LiveConsole:
    """A bar with the time left, the phase, and the figures of the last step."""

    def __init__(self, clock: Clock, start_step: int, console: Console) -> None:
        self._clock = clock
        self._done = start_step
        self._phase, self._since = "starting", time.monotonic()
        self._figures = ""
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4)
        self._live.start()
        # A process that dies without close() must not leave the terminal without a cursor.
        atexit.register(self._live.stop)

    def step(self, row: Row, seconds: float) -> None:
        self._done = row["step"] + 1
        self._figures = f"{describe_step(row)}  {seconds:.1f}s"

    def status(self, phase: str) -> None:
        self._phase, self._since = phase, time.monotonic()

    def close(self) -> None:
        self._phase = "ended"
        self._live.stop()
        atexit.unregister(self._live.stop)

    def _draw(self) -> RenderableType:
        total = self._clock.total_steps
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        waited = duration(time.monotonic() - self._since)
        bar.add_row(
            f"step {self._done}/{total}",
            ProgressBar(total=total, completed=self._done),
            f"{self._phase} {waited}  left {duration(self._clock.left(self._done))}",
        )
        return Group(Text(self._figures, no_wrap=True, overflow="ellipsis"), bar)


def open_console(
    total_steps: int, start_step: int, stream: TextIO | None = None
) -> tuple[Clock, PlainConsole | LiveConsole]:
    """The console that suits the stream (default: stdout)."""
    stream = stream or sys.stdout
    clock = Clock(total_steps)
    if stream.isatty():
        return clock, LiveConsole(clock, start_step, Console(file=stream))
    return clock, PlainConsole(clock, stream)
