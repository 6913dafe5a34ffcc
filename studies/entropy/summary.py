"""A run in a few numbers and thinned curves."""

from __future__ import annotations

from typing import Any

_CURVES = ("entropy", "reward/mean", "reward/distinct_right", "stare/W")
_EVERY = 5  # steps between the points that are kept of a curve
BAND = 0.15  # of the target, to either side
_SMOOTHING = 0.7  # as the pi schedule smooths


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one run.

    `in_band` is the share of the steps after the first tenth whose smoothed entropy is within 15 % of the
    target; entropy, reward and length are means over the last fifth. Evaluations are kept by finished steps.
    """
    last = rows[-max(1, len(rows) // 5) :]
    target = next((r["stare/target_entropy"] for r in reversed(rows) if r.get("stare/target_entropy")), None)
    return {
        "steps": len(rows),
        "start_entropy": _mean(rows[:10], "entropy"),
        "target": target,
        "in_band": None if target is None else in_band(rows, target),
        "entropy": _mean(last, "entropy"),
        "reward": _mean(last, "reward/mean"),
        "length": _mean(last, "response/length"),
        "evaluations": {row["step"] + 1: _evaluation(row) for row in rows if "eval/reward" in row},
        "curves": {key: [row.get(key) for row in rows[::_EVERY]] for key in _CURVES if key in rows[-1]},
        "every": _EVERY,
    }


def in_band(rows: list[dict[str, Any]], target: float) -> float:
    """Share of the steps after the first tenth with the smoothed entropy within 15 % of the target."""
    smoothed, inside = rows[0]["entropy"], []
    for row in rows:
        smoothed = _SMOOTHING * smoothed + (1 - _SMOOTHING) * row["entropy"]
        inside.append(abs(smoothed / target - 1) <= BAND)
    late = inside[len(inside) // 10 :]
    return sum(late) / len(late)


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def _evaluation(row: dict[str, Any]) -> dict[str, float]:
    return {key.removeprefix("eval/"): value for key, value in row.items() if key.startswith("eval/")}
