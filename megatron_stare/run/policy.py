"""From scored groups to what the engine learns: advantages, each replica's share, token weights, the loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_stare.config.schema import Config
from megatron_stare.engine.batch import Microbatch, TrainSequence, plan_update
from megatron_stare.engine.step import LossFunction, Signals
from megatron_stare.objective import grpo_advantages, policy_loss, sft_loss
from megatron_stare.stare import EntropyGate, GateConfig, ReweightRule, token_weights
from megatron_stare.tasks.sample import Group


@dataclass
class Share:
    """One replica's part of a step.

    `updates` holds, for each optimizer update, its microbatches as lists of sequences; `normalizers` the
    response tokens of each update over all replicas (N of the token mean).
    """

    updates: list[list[list[TrainSequence]]]
    normalizers: list[int]


def rl_sequences(groups: list[Group]) -> list[TrainSequence]:
    """Every response with its group-relative advantage, in the order of the groups."""
    rewards = torch.tensor([[r.reward for r in group.responses] for group in groups], dtype=torch.float64)
    advantages = grpo_advantages(rewards).tolist()
    return [
        _sequence(group.prompt.token_ids, response.token_ids, advantage, response.log_probs)
        for group, row in zip(groups, advantages, strict=True)
        for response, advantage in zip(group.responses, row, strict=True)
    ]


def sft_sequences(rows: list[tuple[list[int], list[int]]]) -> list[TrainSequence]:
    """Pairs of prompt ids and response ids as sequences to imitate."""
    return [_sequence(prompt, response, 1.0, None) for prompt, response in rows]


def _sequence(prompt, response, advantage, log_probs) -> TrainSequence:
    mask = np.zeros(len(prompt) + len(response), dtype=bool)
    mask[len(prompt) :] = True
    return TrainSequence(
        token_ids=np.array([*prompt, *response], dtype=np.int64),
        response_mask=mask,
        advantage=advantage,
        sampler_log_probs=None if log_probs is None else np.array(log_probs, dtype=np.float32),
    )


def share_out(
    sequences: list[TrainSequence], *, replicas: int, updates: int, max_tokens: int, multiple: int = 1
) -> list[Share]:
    """Cut the step into updates of consecutive sequences and give each replica a balanced part of each."""
    size = -(-len(sequences) // updates)
    shares = [Share([], []) for _ in range(replicas)]
    for start in range(0, len(sequences), size):
        part = sequences[start : start + size]
        schedule = plan_update([len(s) for s in part], replicas, max_tokens, multiple)
        tokens = sum(s.response_tokens for s in part)
        for share, microbatches in zip(shares, schedule, strict=True):
            share.updates.append([[part[i] for i in chosen] for chosen in microbatches])
            share.normalizers.append(tokens)
    return shares


def make_gate(config: Config) -> EntropyGate | None:
    """STARE's gate as the config describes it; None where STARE is off."""
    stare = config.stare
    if not stare.enabled or config.objective != "rl":
        return None
    rule = (
        ReweightRule.o1(W=stare.W, top_fraction=stare.top_fraction)
        if stare.rule == "o1"
        else ReweightRule.c2(W=stare.W, M=stare.M, top_fraction=stare.top_fraction)
    )
    return EntropyGate(
        GateConfig(
            rule=rule,
            mode=stare.gate,
            schedule=stare.schedule,
            target_entropy=stare.target_entropy,
            alpha=stare.alpha,
            W_max=stare.W_max,
            M_min=stare.M_min,
            kp=stare.kp,
            ki=stare.ki,
            smoothing=stare.smoothing,
        )
    )


def stare_weights(
    microbatches: list[Microbatch],
    signals: Signals,
    rule: ReweightRule | None,
    group: dist.ProcessGroup,
) -> list[torch.Tensor | None]:
    """Token weights a microbatch, float32 [N]; None where the gate is closed, which is plain GRPO.

    Ranks the surprisal of the whole step over all replicas, under the policy at the start of the step.
    """
    if rule is None:
        return [None] * len(microbatches)
    surprisal = -torch.cat(signals.log_probs)
    advantage = torch.cat([mb.advantages for mb in microbatches])
    weights = token_weights(surprisal, advantage, torch.ones_like(advantage, dtype=torch.bool), rule, group)
    return list(weights.split([mb.response_tokens for mb in microbatches]))


def rl_loss(
    config: Config,
    microbatches: list[Microbatch],
    old_log_probs: list[torch.Tensor],
    weights: list[torch.Tensor | None],
) -> LossFunction:
    """The clipped objective over `microbatches`, against the policy at the start of the step."""
    algorithm = config.algorithm

    def loss(i: int, log_probs: torch.Tensor, entropy: torch.Tensor):
        mb = microbatches[i]
        result = policy_loss(
            log_probs,
            old_log_probs[i],
            mb.advantages,
            torch.ones_like(log_probs, dtype=torch.bool),
            weights[i],
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
        )
        return result.loss_sum, result.metrics

    return loss


def supervised_loss(i: int, log_probs: torch.Tensor, entropy: torch.Tensor):
    """Cross-entropy of the response tokens, and the entropy of their distributions."""
    result = sft_loss(log_probs, torch.ones_like(log_probs, dtype=torch.bool))
    return result.loss_sum, {"entropy": entropy.detach().sum()}


def sampler_gap(microbatches: list[Microbatch], signals: Signals) -> torch.Tensor:
    """Sum and maximum over this replica of |trainer's - sampler's log-prob|, float64 [2]."""
    gaps = [
        (mine - mb.sampler_log_probs).abs()
        for mine, mb in zip(signals.log_probs, microbatches, strict=True)
    ]
    flat = torch.cat(gaps).double()
    return torch.stack([flat.sum(), flat.max() if flat.numel() else flat.new_zeros(())])
