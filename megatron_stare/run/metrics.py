"""What a step's groups and updates come to, as numbers by name."""

from __future__ import annotations

from statistics import fmean, pstdev

from megatron_stare.engine.step import UpdateStats
from megatron_stare.tasks.sample import Group


def group_metrics(groups: list[Group]) -> dict[str, float]:
    """Rewards, lengths and diversity of a step's responses."""
    responses = [response for group in groups for response in group.responses]
    rewards = [response.reward for response in responses]
    lengths = [len(response.token_ids) for response in responses]
    right = [{r.text for r in group.responses if r.reward > 0} for group in groups]
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/any_right": fmean(bool(texts) for texts in right),
        "reward/distinct_right": fmean(len(texts) for texts in right),
        "response/length": fmean(lengths),
        "response/length_max": max(lengths),
        "response/truncated": fmean(response.finish_reason == "length" for response in responses),
    }


def merge_updates(updates: list[UpdateStats], normalizers: list[float]) -> UpdateStats:
    """A step's updates as one: losses weighted by their N, sums added, the largest gradient norm."""
    total = max(sum(normalizers), 1)
    return UpdateStats(
        loss=sum(update.loss * n for update, n in zip(updates, normalizers, strict=True)) / total,
        grad_norm=max(update.grad_norm for update in updates),
        sums={name: sum(update.sums[name] for update in updates) for name in updates[0].sums},
        skipped=sum(update.skipped for update in updates),
    )
