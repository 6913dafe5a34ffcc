"""The study's pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from studies.entropy.summary import BAND

_PANELS = (
    ("entropy", "mean token entropy (nats)"),
    ("reward/mean", "mean reward"),
    ("reward/distinct_right", "distinct right answers\nof a prompt's 16 responses"),
)
_COLOURS = (
    "tab:red",
    "tab:blue",
    "tab:green",
    "tab:purple",
    "tab:orange",
    "tab:brown",
    "tab:pink",
    "tab:cyan",
)
_MARKERS = "osD^vP*Xph<>"
_LEAST_REWARD = 0.84  # less than the policy had at the start of the study
_CROWD = 3.0  # distinct answers


def plot_curves(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Entropy, reward and distinct right answers by step, a thin line a seed, with the band of the target."""
    figure = _figure(9, 9)
    axes = figure.subplots(len(_PANELS), 1, sharex=True)
    for colour, (name, records) in zip(_COLOURS, runs.items(), strict=False):
        for number, record in enumerate(records):
            for ax, (key, _) in zip(axes, _PANELS, strict=True):
                numbers = _smooth(record["curves"][key])
                steps = [i * record["every"] for i in range(len(numbers))]
                label = name if number == 0 else None
                ax.plot(steps, numbers, color=colour, linewidth=1.0, alpha=0.8, label=label)
    targets = [record["target"] for records in runs.values() for record in records if record["target"]]
    if targets:
        mean = sum(targets) / len(targets)
        axes[0].axhline(mean, color="black", linestyle="--", linewidth=1, label=f"target (mean {mean:.2f})")
        axes[0].axhspan(mean * (1 - BAND), mean * (1 + BAND), color="black", alpha=0.06)
    for ax, (_, label) in zip(axes, _PANELS, strict=True):
        ax.set_ylabel(label)
        ax.grid(alpha=0.25)
    axes[1].set_ylim(0.7, 1.0)
    axes[0].legend(fontsize="small")
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=110)


def plot_trade_off(points: list[dict[str, Any]], path: Path) -> None:
    """Distinct right answers of 64 samples against reward, a point a setting, one colour a method.

    Settings with less than `_LEAST_REWARD` are named below the figure instead of drawn.
    """
    figure = _figure(8, 5.8)
    ax = figure.subplots()
    drawn = [point for point in points if point["reward"] >= _LEAST_REWARD]
    handles = []
    for number, method in enumerate(dict.fromkeys(point["method"] for point in drawn)):
        style = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}
        handles.append(Line2D([], [], linestyle="", label=method, **style))
        for point in drawn:
            if point["method"] == method:
                ax.plot(point["reward"], point["distinct"], alpha=0.8, **style)
                # Policies that have collapsed lie on top of each other, and so would their labels.
                if point["distinct"] > _CROWD:
                    ax.annotate(
                        point["label"], (point["reward"], point["distinct"]), fontsize=8,
                        xytext=(5, 3), textcoords="offset points",
                    )  # fmt: skip
    left_out = [f"{p['method']} {p['label']} ({p['reward']:.2f})" for p in points if p not in drawn]
    below = f"\nnot drawn, with less reward: {', '.join(left_out)}" if left_out else ""
    ax.set_xlabel(f"reward of the evaluation{below}")
    ax.set_ylabel("distinct right answers of 64 samples")
    ax.set_xlim(_LEAST_REWARD, 1.005)
    ax.grid(alpha=0.25)
    ax.legend(handles=handles, fontsize="small", loc="center left")
    figure.savefig(path, dpi=110)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it may look for a display
    return figure


def _smooth(numbers: list[float | None], half: int = 3) -> list[float]:
    known = [number for number in numbers if number is not None]
    windows = (known[max(0, i - half) : i + half + 1] for i in range(len(known)))
    return [sum(window) / len(window) for window in windows]
