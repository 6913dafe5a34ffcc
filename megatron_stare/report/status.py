"""What a run does now, for a person or a program. Where it is read from: run/status.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class NodeStatus:
    """One node of the job. Times are seconds since 1970; `silent` is the age of its last sign of life."""

    node: int
    host: str
    pid: int | None
    state: str
    started: float | None
    silent: float | None
    alive: bool
    children: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    message: str = ""


@dataclass(frozen=True)
class RunStatus:
    """The whole run.

    Attributes:
        state: starting, running or stopping; done, preempted, refused or failed; "dead" when it was alive and
            has neither ended in order nor given a sign of life; "unknown" before any node has written.
        message: how it ended, or why it is taken for dead.
        of: None where nothing tells it; likewise below.
        step_seconds: median of the last steps.
        checkpoints: finished steps and age in seconds, oldest first.
        damaged: files that could not be read.
    """

    run: str
    state: str
    message: str = ""
    job: str | None = None
    started: float | None = None
    steps: int = 0
    of: int | None = None
    phase: str | None = None
    phase_seconds: float | None = None
    step_seconds: float | None = None
    nodes: list[NodeStatus] = field(default_factory=list)
    checkpoints: list[tuple[int, float]] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    problem_count: int = 0
    damaged: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether it goes on, or has ended as it should."""
        return self.state in (*LIVING, "done", "preempted")


LIVING = ("starting", "running", "stopping")
_COLOURS = {
    "done": "green",
    "running": "green",
    "starting": "cyan",
    "stopping": "yellow",
    "preempted": "yellow",
}


def render(status: RunStatus, now: float | None = None) -> Group:
    """Tables for the terminal."""
    now = time.time() if now is None else now
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(status, now):
        facts.add_row(name, value)
    parts: list[Any] = [facts]
    if status.nodes:
        parts.append(_node_table(status.nodes, now))
    for problem in status.problems:
        when = duration(max(0.0, now - problem["time"]))
        where = f"{problem['source']} on {problem.get('host', '?')}"
        parts.append(escape(f"{when} ago, {where}: {problem['message']}"))
    return Group(*parts)


def print_status(status: RunStatus, console: Console) -> None:
    """`render`, on a console that does not cut names where the terminal is narrow."""
    console.print(render(status), highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Two units at most: 3 d 4 h, 5 min 6 s, 7 s."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    left, parts = int(seconds), []
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if not part.startswith("0 ")) or "0 s"


def _facts(status: RunStatus, now: float) -> Iterator[tuple[str, str]]:
    yield "run", escape(status.run)
    colour = _COLOURS.get(status.state, "red")
    message = escape(f": {status.message}") if status.message else ""
    yield "state", f"[{colour}]{escape(status.state)}[/]{message}"
    if status.job:
        yield "job", escape(status.job)
    if status.started is not None:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.started))
        yield "since", clock + (f" ({duration(now - status.started)})" if status.state in LIVING else "")
    yield "steps", f"{status.steps} of {status.of}" if status.of else str(status.steps)
    if status.phase and status.phase_seconds is not None:
        yield "now", escape(f"{status.phase} for {duration(status.phase_seconds)}")
    if status.step_seconds is not None:
        left = ""
        if status.of and status.of > status.steps:
            left = f"; {duration((status.of - status.steps) * status.step_seconds)} left"
        yield "a step takes", f"{duration(status.step_seconds)}{left}"
    if status.checkpoints:
        steps, age = status.checkpoints[-1]
        yield "last checkpoint", f"after {steps} steps, {duration(age)} ago"
    else:
        yield "last checkpoint", "none"
    if status.damaged:
        yield "unreadable", escape(", ".join(status.damaged))
    yield "problems", str(status.problem_count) + ("; the last:" if status.problems else "")


def _node_table(nodes: list[NodeStatus], now: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("node", "host", "state", "for", "last sign", "processes", "restarts"):
        table.add_column(heading, overflow="fold")
    for node in nodes:
        children = {"supervisor": node.pid, **node.children}
        table.add_row(
            str(node.node),
            escape(node.host),
            escape(node.state) + ("" if node.alive or node.state not in LIVING else " [red](dead)[/]"),
            "" if node.started is None else duration(_last_sign(node, now) - node.started),
            "" if node.silent is None else f"{duration(node.silent)} ago",
            escape(", ".join(f"{name} {pid}" for name, pid in children.items() if pid is not None)),
            escape(", ".join(f"{name} {count}" for name, count in node.restarts.items() if count)),
        )
    return table


def _last_sign(node: NodeStatus, now: float) -> float:
    return now if node.silent is None else now - node.silent
