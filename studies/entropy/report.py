"""Tables and figures of the finished runs."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from studies.entropy.figures import plot_curves, plot_trade_off
from studies.entropy.settings import LR, MAIN, NOISE, PARTS, RIVAL_STEPS, Setting, runs
from studies.entropy.summary import BAND

Record = dict[str, Any]
_COLUMNS = (
    "runs",
    "entropy",
    "of target",
    "in band",
    "once there",
    "reward",
    "eval reward",
    "pass@16",
    "distinct",
    "length",
)


def write(results: Path, images: Path) -> str:
    """Draw images/study-*.png from the results, and return the tables as Markdown."""
    found = load(results)
    images.mkdir(parents=True, exist_ok=True)
    plot_curves({_title(s): found[s.name] for s in MAIN if s.name in found}, images / "study-curves.png")
    equal = {s: found[s.name] for s in _comparable() if s.name in found}
    plot_trade_off([_point(s, records) for s, records in equal.items()], images / "study-trade-off.png")
    parts = [_table(part, found) for part in PARTS]
    return "\n\n".join(part for part in parts if part)


def load(results: Path) -> dict[str, list[Record]]:
    """Finished runs by the name of their setting."""
    found: dict[str, list[Record]] = defaultdict(list)
    for setting, seed in runs():
        file = results / f"{setting.name}_seed{seed}.json"
        if file.exists():
            found[setting.name].append(json.loads(file.read_text(encoding="utf-8")))
    return dict(found)


def _comparable() -> list[Setting]:
    """Settings with one learning rate and start, whose evaluation after `RIVAL_STEPS` steps is compared."""
    settings = [*PARTS["main"], *PARTS["rivals"], *PARTS["starts"]]
    return [s for s in settings if s.lr == LR and s.noise == NOISE]


def _point(setting: Setting, records: list[Record]) -> dict[str, Any]:
    at = [record["evaluations"][str(RIVAL_STEPS)] for record in records]
    return {
        "method": setting.method,
        "label": setting.label,
        "reward": _mean(at, "reward"),
        "distinct": _mean(at, "distinct_right"),
    }


def _title(setting: Setting) -> str:
    return f"{setting.method} {setting.label}".strip()


def _table(part: str, found: dict[str, list[Record]]) -> str:
    lines = [_row(setting, found[setting.name]) for setting in PARTS[part] if setting.name in found]
    if not lines:
        return ""
    head = ["method", "lr", "noise", "steps", *_COLUMNS]
    rule = ["---"] * len(head)
    return "\n".join([f"### {part}", "", *("| " + " | ".join(row) + " |" for row in (head, rule, *lines))])


def _row(setting: Setting, records: list[Record]) -> list[str]:
    last = [record["evaluations"][str(record["steps"])] for record in records]
    targets = [record["entropy"] / record["target"] for record in records if record["target"]]
    bands = [record["in_band"] for record in records if record["in_band"] is not None]
    return [
        _title(setting),
        f"{setting.lr:g}",
        f"{setting.noise:g}",
        str(setting.steps),
        str(len(records)),
        f"{_mean(records, 'entropy'):.3f}",
        f"{statistics.mean(targets):.2f}" if targets else "",
        _percent(bands),
        _percent([share for record in records if (share := _held(record)) is not None]),
        f"{_mean(records, 'reward'):.3f}",
        f"{_mean(last, 'reward'):.3f}",
        f"{_mean(last, 'pass@16'):.3f}",
        f"{_mean(last, 'distinct_right'):.1f}",
        f"{_mean(records, 'length'):.2f}",
    ]


def _percent(shares: list[float]) -> str:
    return " / ".join(f"{100 * share:.0f} %" for share in shares)


def _held(record: Record) -> float | None:
    """Share of the kept points in the band, from the first one in it on; None without a target."""
    if not record["target"]:
        return None
    inside = [abs(entropy / record["target"] - 1) <= BAND for entropy in record["curves"]["entropy"]]
    later = inside[inside.index(True) :] if True in inside else [False]
    return sum(later) / len(later)


def _mean(records: list[dict[str, Any]], key: str) -> float:
    return statistics.mean(record[key] for record in records)
