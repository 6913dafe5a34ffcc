"""Pictures of a run: entropy against its target, the gate, reward."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_stare.report.metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("tab:red", "tab:blue", "tab:green", "tab:purple", "tab:orange", "tab:brown")
_COMPARED = (
    ("entropy", "mean token entropy (nats)", 3),
    ("reward/mean", "mean reward", 2),
    ("reward/distinct_right", "distinct right\nanswers a prompt", 2),
)


def plot_entropy(rows: Sequence[Row], path: str | Path, *, title: str, target: float | None = None) -> bool:
    """Draws entropy with its target and the steps at which STARE's gate was open, the reward, and W and M.

    A panel without numbers is left out; supervised runs show their loss. The file appears complete or
    not at all. Returns False, and writes nothing, if there is nothing to draw.
    """
    panels: list[tuple[Any, int]] = []
    if _series(rows, "entropy")[0]:
        panels.append((lambda ax: _entropy_panel(ax, rows, target), 3))
    if _series(rows, "reward/mean")[0]:
        panels.append((lambda ax: _reward_panel(ax, rows), 2))
    if len(set(_series(rows, "stare/W")[1])) > 1:
        panels.append((lambda ax: _weights_panel(ax, rows), 2))
    if not panels and _series(rows, "loss")[0]:
        panels.append((lambda ax: _loss_panel(ax, rows), 3))
    if not panels:
        return False
    figure, axes = _figure([height for _, height in panels], title)
    for (draw, _), ax in zip(panels, axes, strict=True):
        draw(ax)
    _save(figure, axes, path)
    return True


def plot_comparison(
    runs: Mapping[str, Sequence[Row]], target: float | None, path: str | Path, *, title: str | None = None
) -> None:
    """Draws entropy, reward and (where recorded) distinct right answers of several runs on one picture."""
    panels = [
        (key, label, height)
        for key, label, height in _COMPARED
        if any(_series(rows, key)[0] for rows in runs.values()) or key == "entropy"
    ]
    figure, axes = _figure([height for *_, height in panels], title or " and ".join(runs))
    for (key, label, _), ax in zip(panels, axes, strict=True):
        for (name, rows), colour in zip(runs.items(), itertools.cycle(_COLOURS), strict=False):
            _noisy(ax, *_series(rows, key), colour, name)
        if key == "entropy" and target is not None:
            ax.axhline(target, color="black", linestyle="--", linewidth=1, label=f"target {target:g}")
        ax.set_ylim(bottom=0)
        ax.set_ylabel(label)
        _legend(ax)
    _save(figure, axes, path)


def _figure(heights: list[int], title: str) -> tuple[Figure, list[Axes]]:
    # No pyplot: it keeps figures in global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 * sum(heights) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    figure.suptitle(title)
    return figure, list(grid[:, 0])


def _save(figure: Figure, axes: list[Axes], path: str | Path) -> None:
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.margins(x=0.01)
    axes[-1].set_xlabel("step")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(aside, format=path.suffix.lstrip(".") or "png", dpi=110)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _entropy_panel(ax: Axes, rows: Sequence[Row], target: float | None) -> None:
    steps, numbers = _series(rows, "entropy")
    if spans := open_spans(rows):
        # One artist for all: a gate that chatters for thousands of steps must not slow the drawing.
        ax.broken_barh(
            [(start - 0.5, end - start + 1) for start, end in spans],
            (0, 1),
            transform=ax.get_xaxis_transform(),
            color="tab:green",
            alpha=0.12,
            linewidth=0,
            label="STARE's gate open",
        )
    ax.plot(steps, numbers, color="tab:blue", linewidth=1.4, label="entropy", marker=_marker(steps))
    if target is not None:
        ax.axhline(target, color="black", linestyle="--", linewidth=1, label=f"target {target:g}")
    ax.set_ylim(bottom=0)
    ax.set_ylabel("mean token entropy (nats)")
    _legend(ax)


def _reward_panel(ax: Axes, rows: Sequence[Row]) -> None:
    _noisy(ax, *_series(rows, "reward/mean"), "tab:red", "reward")
    eval_key = next((k for row in rows for k in row if k.startswith("eval/") and "reward" in k), None)
    if eval_key is not None:
        ax.plot(*_series(rows, eval_key), "o", color="black", markersize=4, label="evaluation")
    ax.set_ylabel("mean reward")
    _legend(ax)


def _weights_panel(ax: Axes, rows: Sequence[Row]) -> None:
    ax.plot(*_series(rows, "stare/W"), color="tab:green", label="W (A > 0)")
    if len(set(_series(rows, "stare/M")[1])) > 1:
        ax.plot(*_series(rows, "stare/M"), color="tab:orange", label="M (A < 0)")
    ax.set_ylabel("weight of high-\nsurprisal tokens")
    _legend(ax)


def _loss_panel(ax: Axes, rows: Sequence[Row]) -> None:
    _noisy(ax, *_series(rows, "loss"), "tab:blue", "loss")
    ax.set_ylabel("loss (nats a token)")
    _legend(ax)


def _noisy(ax: Axes, steps: list[int], numbers: list[float], colour: str, label: str) -> None:
    """The numbers, and on top of long series a running mean that the eye can follow."""
    if len(steps) < 40:
        ax.plot(steps, numbers, color=colour, linewidth=1.4, label=label, marker=_marker(steps))
        return
    ax.plot(steps, numbers, color=colour, linewidth=0.8, alpha=0.3)
    ax.plot(steps, running_mean(numbers, len(steps) // 25), color=colour, linewidth=1.6, label=label)


def _marker(steps: list[int]) -> str | None:
    return "o" if len(steps) == 1 else None


def _legend(ax: Axes) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="best", fontsize="small", framealpha=0.8)


def running_mean(numbers: Sequence[float], half: int) -> list[float]:
    """Mean of each number and its `half` neighbours on either side."""
    means = []
    for i in range(len(numbers)):
        around = numbers[max(0, i - half) : i + half + 1]
        means.append(sum(around) / len(around))
    return means


def open_spans(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """First and last step of every stretch in which STARE's gate was open."""
    spans: list[tuple[int, int]] = []
    previous_open = False
    for row in rows:
        is_open = bool(row.get("stare/open"))
        if is_open and previous_open:
            spans[-1] = (spans[-1][0], row["step"])
        elif is_open:
            spans.append((row["step"], row["step"]))
        previous_open = is_open
    return spans


def _series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], float(row[key])) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [number for _, number in points]
