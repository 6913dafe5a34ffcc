"""What a finished run amounts to, for a person: a table on the console and summary.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from megatron_stare.config.schema import Config
from megatron_stare.report.console import duration
from megatron_stare.report.metrics import Row, values

_COMPARED = (
    ("reward/mean", "reward"),
    ("entropy", "entropy (nats)"),
    ("response/length", "response length (tokens)"),
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("stare/W", "STARE W"),
    ("stare/M", "STARE M"),
)


@dataclass(frozen=True)
class Summary:
    """`facts` are name and value; `changes` are name, mean of the first fifth, mean of the last fifth."""

    name: str
    outcome: str
    facts: list[tuple[str, str]]
    changes: list[tuple[str, float, float]]
    files: list[str]


def fifths(rows: Sequence[Row], key: str) -> tuple[float, float] | None:
    """Means over the first and the last fifth of the steps (at least one step each); None without numbers."""
    count = max(1, len(rows) // 5)
    first, last = values(rows[:count], key), values(rows[-count:], key)
    if not first or not last:
        return None
    return sum(first) / len(first), sum(last) / len(last)


def summarise(rows: Sequence[Row], config: Config, outcome: str, run_dir: str | Path) -> Summary:
    """The summary of all steps recorded, also of those before a resume."""
    total = config.run.steps
    facts = [("steps", f"{rows[-1]['step'] + 1 if rows else 0} of {total}")]
    if config.objective == "rl" and config.stare.target is not None:
        facts.append(("target entropy", f"{config.stare.target_entropy:g}"))
    if gate := values(rows, "stare/open"):
        facts.append(("STARE's gate open", f"{sum(gate) / len(gate):.0%} of the steps"))
    seconds = values(rows, "time/step")
    if seconds:
        facts.append(("time", f"{duration(sum(seconds))}, {sum(seconds) / len(seconds):.2f} s a step"))
    if speed := tokens_per_second(rows, config):
        facts.append(("speed", f"{speed:,.0f} response tokens/s"))
    if split := time_split(rows):
        facts.append(("time by phase", ", ".join(f"{name} {share:.0%}" for name, share in split)))
    for key, label in (("reward/errors", "reward errors"), ("reward/timeouts", "reward timeouts")):
        if numbers := values(rows, key):
            facts.append((label, f"{sum(numbers):g}"))
    last_eval = next((row for row in reversed(rows) if any(k.startswith("eval/") for k in row)), {})
    facts += [
        (f"{key} (step {last_eval['step'] + 1})", f"{value:.4g}")
        for key, value in last_eval.items()
        if key.startswith("eval/") and value is not None
    ]
    changes = [(label, *means) for key, label in _COMPARED if (means := fifths(rows, key)) is not None]
    return Summary(config.run.name, outcome, facts, changes, _files(Path(run_dir)))


def tokens_per_second(rows: Sequence[Row], config: Config) -> float | None:
    """Response tokens trained on a second of the whole step, from `tokens` or the mean length."""
    responses = config.batch.prompts_per_step * config.batch.responses_per_prompt
    tokens = seconds = 0.0
    for row in rows:
        length, took = row.get("response/length"), row.get("time/step")
        count = row.get("tokens", length * responses if length is not None else None)
        if count is not None and took:
            tokens += count
            seconds += took
    return tokens / seconds if seconds else None


def time_split(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """Share of the time of each phase, largest first; `other` is what no phase accounts for."""
    sums: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("time/") and value is not None:
                sums[key.removeprefix("time/")] = sums.get(key.removeprefix("time/"), 0.0) + float(value)
    total = sums.pop("step", None)
    known = sum(sums.values())
    if not sums or known <= 0:
        return []
    if total is not None and total > known:
        sums["other"] = total - known
    whole = max(known, total or 0.0)
    return sorted(((name, value / whole) for name, value in sums.items()), key=lambda item: -item[1])


def markdown(summary: Summary) -> str:
    lines = [f"# {summary.name}: {summary.outcome}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in summary.facts]
    if summary.changes:
        lines += ["", "| mean over | first fifth | last fifth |", "| --- | --- | --- |"]
        lines += [f"| {name} | {first:.4g} | {last:.4g} |" for name, first, last in summary.changes]
    if summary.files:
        lines += ["", "Files in this directory:", ""]
        lines += [f"- `{name}`" for name in summary.files]
    return "\n".join(lines) + "\n"


def table(summary: Summary) -> Table:
    """For the console: figures first, then how they changed."""
    result = Table(title=f"{summary.name}: {summary.outcome}", title_justify="left", show_header=True)
    result.add_column("")
    result.add_column("first fifth", justify="right")
    result.add_column("last fifth", justify="right")
    for name, first, last in summary.changes:
        result.add_row(name, f"{first:.4g}", f"{last:.4g}")
    return result


def write_summary(summary: Summary, path: str | Path) -> None:
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_text(markdown(summary), encoding="utf-8")
    aside.replace(path)


def _files(run_dir: Path) -> list[str]:
    if not run_dir.is_dir():
        return []
    return sorted(
        f"{entry.name}/" if entry.is_dir() else entry.name
        for entry in run_dir.iterdir()
        if not entry.name.startswith(".")
    )
