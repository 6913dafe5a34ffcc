"""`megatron-stare quickstart`: a tiny policy, warmed up, then trained by GRPO and by STARE, side by side."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_stare.config import load_config
from megatron_stare.errors import UserError
from megatron_stare.report import plot_comparison, read_metrics
from megatron_stare.run import supervisor
from megatron_stare.run.files import RunFiles

CONFIGS = Path(__file__).parents[2] / "configs" / "quickstart"
_RUNS = {"GRPO": "grpo", "STARE": "stare"}


def quickstart(directory: Path, seed: int, overrides: list[str]) -> int:
    """Make the policy, train both runs under `directory`, and show what differs. Returns the exit code.

    A finished part is not done again, so an interrupted quickstart goes on where it was. Overrides apply to
    both RL runs. Raises UserError where the configs are missing (an installation without the repository).
    """
    if not CONFIGS.is_dir():
        raise UserError(f"{CONFIGS} is missing: run the quickstart from a checkout of the repository")
    begin = time.monotonic()
    model = directory / "model"
    if not model.is_dir():
        write_policy(model, seed)
    files = {"sft": RunFiles(directory / "sft"), **{n: RunFiles(directory / n) for n in _RUNS.values()}}
    for name, run in files.items():
        if _is_done(run):
            continue
        shutil.rmtree(run.root, ignore_errors=True)
        start = model if name == "sft" else files["sft"].hf
        print(f"\n=== {name} ===", file=sys.stderr)
        config = load_config(
            CONFIGS / f"{name}.yaml",
            [
                *(overrides if name != "sft" else []),
                f"run.dir={run.root}",
                f"run.seed={seed}",
                f"model.path={start}",
            ],
        )
        if code := supervisor.train(config):
            return code
    metrics = {label: read_metrics(files[name].metrics) for label, name in _RUNS.items()}
    target = load_config(CONFIGS / "stare.yaml", [*overrides, f"model.path={model}"]).stare.target_entropy
    picture = directory / "comparison.png"
    plot_comparison(metrics, target, picture)
    _show(compare(metrics, target), target, picture, time.monotonic() - begin, directory)
    return supervisor.DONE


def compare(metrics: dict[str, list[dict]], target: float) -> dict[str, dict[str, float]]:
    """What the comparison claims, by run: means over the last fifth, and the final evaluation."""
    rows = {}
    for label, steps in metrics.items():
        last = steps[-max(1, len(steps) // 5) :]
        entropy = sum(step["entropy"] for step in last) / len(last)
        rows[label] = {
            "entropy": entropy,
            "entropy_over_target": entropy / target,
            "reward": sum(step["reward/mean"] for step in last) / len(last),
            "distinct_right": steps[-1]["eval/distinct_right"],
            "seconds_a_step": statistics.median(step["time/step"] for step in steps),
        }
    return rows


def write_policy(model: Path, seed: int) -> None:
    """Write the policy of the sums task, untrained: Qwen3 of 0.4M parameters with a tokenizer of its own."""
    from megatron_stare.tasks import load_tokenizer
    from megatron_stare.tasks.sums import VOCABULARY, write_tokenizer
    from megatron_stare.weights import write_tiny_checkpoint

    tokenizer = model.parent / "tokenizer"
    write_tokenizer(tokenizer)
    write_tiny_checkpoint(
        model,
        architecture="qwen3",
        layers=3,
        hidden=96,
        heads=4,
        kv_heads=4,
        head_dim=24,
        ffn=256,
        vocab_size=len(VOCABULARY),
        seed=seed,
        max_position_embeddings=64,
        tokenizer=load_tokenizer(tokenizer),
    )


def _is_done(run: RunFiles) -> bool:
    try:
        return json.loads(run.outcome.read_text(encoding="utf-8"))["outcome"] == "done"
    except (OSError, ValueError, KeyError):
        return False


def _show(rows: dict, target: float, picture: Path, seconds: float, directory: Path) -> None:
    table = Table(title="The same start, the same task: GRPO and GRPO + STARE", title_justify="left")
    table.add_column("")
    for label in rows:
        table.add_column(label, justify="right")
    lines = [
        ("reward, last fifth", "reward", "{:.3f}"),
        (f"entropy, last fifth (target {target:g})", "entropy", "{:.3f}"),
        ("entropy over target", "entropy_over_target", "{:.2f}"),
        ("distinct right answers of 64", "distinct_right", "{:.1f}"),
        ("seconds a step", "seconds_a_step", "{:.2f}"),
    ]
    for title, key, form in lines:
        table.add_row(title, *(form.format(row[key]) for row in rows.values()))
    console = Console()
    console.print(table)
    console.print(f"picture: {picture}\n{seconds:.0f} s in all", soft_wrap=True)
    (directory / "comparison.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
