"""From scored groups to what the engine learns: advantages, each replica's share, token weights, the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_stare.config.parts import entropy_control, objective_spec
from megatron_stare.config.schema import AlgorithmSection, Config
from megatron_stare.engine.batch import Microbatch, TrainSequence
from megatron_stare.engine.packing import plan_update
from megatron_stare.engine.step import LossFunction, Signals
from megatron_stare.objective import (
    TokenTerms,
    advantages,
    normalizer,
    objective_loss,
    prepare,
    sft_loss,
    token_multipliers,
)
from megatron_stare.tasks.sample import Group


@dataclass
class Share:
    """One replica's part of a step.

    `updates` holds, for each optimizer update, its microbatches as lists of sequences; `normalizers` N of
    each update over all replicas, by which its loss is divided.
    """

    updates: list[list[list[TrainSequence]]]
    normalizers: list[float]


def rl_sequences(groups: list[Group], algorithm: AlgorithmSection | None = None) -> list[TrainSequence]:
    """Every response with its advantage (default: GRPO's), in the order of the groups."""
    algorithm = algorithm or AlgorithmSection()
    rewards = torch.tensor([[r.reward for r in group.responses] for group in groups], dtype=torch.float64)
    lengths = torch.tensor([[len(r.token_ids) for r in group.responses] for group in groups])
    rows = advantages(
        algorithm.advantage, rewards, lengths=lengths, positive_weight=algorithm.positive_weight
    ).tolist()
    return [
        _sequence(group.prompt.token_ids, response.token_ids, advantage, response.log_probs)
        for group, row in zip(groups, rows, strict=True)
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
    sequences: list[TrainSequence],
    *,
    replicas: int,
    updates: int,
    max_tokens: int,
    multiple: int = 1,
    length_of: Callable[[int], int] = int,
    attention_length: float = 16384.0,
    normalization: str = "token_mean",
    max_response_tokens: int | None = None,
) -> list[Share]:
    """Cut the step into updates of consecutive sequences and give each replica a balanced part of each.

    `length_of` says how many tokens a sequence takes when it is packed (`Context.padded`), for the budget
    `max_tokens`; `attention_length` what attention costs (see `packing.attention_length`). `normalization`
    and `max_response_tokens` decide N, see `objective.normalizer`.
    """
    for number, sequence in enumerate(sequences):
        sequence.number = number
    size = -(-len(sequences) // updates)
    shares = [Share([], []) for _ in range(replicas)]
    for start in range(0, len(sequences), size):
        part = sequences[start : start + size]
        lengths = [length_of(len(sequence)) for sequence in part]
        schedule = plan_update(lengths, replicas, max_tokens, multiple, attention_length=attention_length)
        divisor = normalizer(normalization, [s.response_tokens for s in part], max_response_tokens)
        for share, microbatches in zip(shares, schedule, strict=True):
            share.updates.append([[part[i] for i in chosen] for chosen in microbatches])
            share.normalizers.append(divisor or 1.0)  # an update without tokens has nothing to divide
    return shares


def control_terms(
    config: Config, microbatches: list[Microbatch], signals: Signals, step: int, group: dist.ProcessGroup
) -> list[TokenTerms | None]:
    """What the config's entropy control asks of each microbatch's tokens; None without one. Collective."""
    control = entropy_control(config.algorithm)
    terms = prepare(
        control,
        log_probs=torch.cat(signals.log_probs),
        entropy=torch.cat(signals.entropy),
        advantages=torch.cat([mb.advantages for mb in microbatches]),
        token_ids=torch.cat([mb.token_numbers for mb in microbatches]),
        seed=config.run.seed,
        step=step,
        group=group,
    )
    sizes = [mb.response_tokens for mb in microbatches]
    return [None] * len(microbatches) if terms is None else terms.split(sizes)


@dataclass
class Targets:
    """What the loss of a step needs beside its microbatches, each a list with one entry a microbatch.

    `old_log_probs`: of the policy at the start of the step; `weights`: STARE's; `terms`: an entropy
    control's; `reference`: log-probs of the run's first policy. `advantage_factor` multiplies all advantages.
    """

    old_log_probs: list[torch.Tensor]
    weights: list[torch.Tensor | None]
    terms: list[TokenTerms | None]
    reference: list[torch.Tensor | None]
    advantage_factor: float = 1.0

    @classmethod
    def plain(cls, old_log_probs: list[torch.Tensor]) -> Targets:
        """Of an objective that needs nothing else."""
        none = [None] * len(old_log_probs)
        return cls(old_log_probs, none, none, none)


def rl_loss(config: Config, microbatches: list[Microbatch], targets: Targets, start: int = 0) -> LossFunction:
    """The objective over `microbatches`, of which the first is number `start` of the step."""
    spec = objective_spec(config.algorithm)
    kind = config.algorithm.normalization

    def loss(i: int, log_probs: torch.Tensor, entropy: torch.Tensor):
        mb, number = microbatches[i], start + i
        # A loss by sequence needs all its tokens: every context-parallel rank then computes the same.
        whole = spec.needs_sequence and mb.own.context.size > 1
        tokens = _token_inputs(mb, targets, number)
        terms = targets.terms[number]
        multipliers = token_multipliers(kind, mb.sequence_tokens) if kind == "sequence_mean" else None
        if whole:
            log_probs, entropy = mb.own.gather(torch.stack([log_probs, entropy]))
            tokens, terms = _gather_constants(mb, tokens, terms)
        elif multipliers is not None:
            multipliers = multipliers[mb.own.index]
        result = objective_loss(
            spec,
            log_probs,
            entropy,
            mask=torch.ones_like(log_probs, dtype=torch.bool),
            terms=terms,
            multipliers=multipliers,
            **tokens,
        )
        if not whole:
            return result.loss_sum, result.metrics
        size = mb.own.context.size
        return result.loss_sum / size, {name: total / size for name, total in result.metrics.items()}

    return loss


def _token_inputs(mb: Microbatch, targets: Targets, number: int) -> dict[str, torch.Tensor | None]:
    """What `objective_loss` takes by token and as constants, for microbatch `number` of the step."""
    advantages = mb.advantages
    if targets.advantage_factor != 1:
        advantages = advantages * targets.advantage_factor
    return {
        "old_log_probs": targets.old_log_probs[number],
        "advantages": advantages,
        "sequence": mb.sequence_of,
        "weights": targets.weights[number],
        "sampler_log_probs": mb.sampler_log_probs,
        "reference_log_probs": targets.reference[number],
    }


def _gather_constants(mb: Microbatch, tokens: dict[str, torch.Tensor | None], terms: TokenTerms | None):
    """`tokens` and `terms` of all context-parallel ranks, in one exchange."""
    named = {name: tensor for name, tensor in tokens.items() if tensor is not None}
    extra = dict(terms.items()) if terms is not None else {}
    # float64 holds every float32 and every number of a sequence exactly.
    stacked = torch.stack([tensor.double() for tensor in (*named.values(), *extra.values())])
    rows = iter(mb.own.gather(stacked))
    gathered = {name: next(rows).to(tensor.dtype) for name, tensor in named.items()}
    terms = TokenTerms(**{name: next(rows).to(tensor.dtype) for name, tensor in extra.items()})
    return tokens | gathered, (terms if extra else None)


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
