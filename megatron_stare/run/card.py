"""The model card of an export: what was trained, from what, how, and how it stood."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_stare import __version__
from megatron_stare.config.schema import Config

_SHOWN = ("reward/mean", "entropy", "loss", "response/length", "eval/reward")


def model_card(config: Config, steps: int, metrics: Mapping[str, float]) -> str:
    """README.md for a Hugging Face directory.

    Args:
        steps: finished steps.
        metrics: of the last step; may be empty.
    """
    base = Path(config.model.path).name
    lines = [
        "---",
        "library_name: transformers",
        f"base_model: {base}",
        "tags: [megatron_stare]",
        "---",
        "",
        f"# {base}, trained by {config.run.name}",
        "",
        f"Written by megatron_stare {__version__} after {steps} of {config.run.steps} steps.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in _facts(config)),
        *(f"| {name}, last step | {metrics[name]:.4g} |" for name in _SHOWN if name in metrics),
        "",
    ]
    return "\n".join(lines)


def _facts(config: Config) -> list[tuple[str, str]]:
    optimizer, batch = config.optimizer, config.batch
    facts = [
        ("objective", config.objective),
        ("data", str(config.task.source)),
        ("learning rate", f"{optimizer.lr:g}, {optimizer.schedule}"),
        ("training dtype", config.model.dtype),
        ("seed", str(config.run.seed)),
    ]
    if config.objective != "rl":
        return [*facts, ("rows a step", str(batch.prompts_per_step))]
    facts += [
        ("prompts x responses a step", f"{batch.prompts_per_step} x {batch.responses_per_prompt}"),
        ("sampling temperature", f"{config.rollout.temperature:g}"),
        ("reward", str(config.task.reward)),
    ]
    stare = config.stare
    if stare.enabled:
        held = f"rule {stare.rule}, gate {stare.gate}, schedule {stare.schedule}"
        facts.append(("STARE", f"{held}, target entropy {stare.target_entropy}"))
    return facts
