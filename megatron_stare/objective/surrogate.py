"""The policy term of a token: what its log-prob is pushed by, before weights, corrections and penalties."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.objective.kl import LOG_RATIO_LIMIT
from megatron_stare.objective.sequences import sequence_sum
from megatron_stare.objective.spec import ObjectiveSpec


@dataclass(frozen=True)
class Surrogate:
    """Tensors shaped like the log-probs; where a token does not count, their values mean nothing."""

    objective: Tensor  # to be maximised, with gradient
    ratio: Tensor  # rho, of the token or of its sequence
    log_ratio: Tensor  # of the token, limited
    stopped: dict[str, Tensor]  # bool: the bound that was in force, by name


def surrogate(
    spec: ObjectiveSpec, new: Tensor, old: Tensor, a: Tensor, inside: Tensor, sequence: Tensor | None
) -> Surrogate:
    """The policy term of `spec.loss`, with rho = pi / pi_old and bounds l = 1 - clip_low, h = 1 + clip_high.

    - "ppo_clip": min(rho A, clip(rho, l, h) A). PPO (arXiv 1707.06347, eq. 7); l and h unequal are
      DAPO's clip-higher (arXiv 2503.14476, section 3.1).
    - "gspo": the same with the sequence's ratio s = exp(mean over its tokens of ln rho) in place of rho
      (arXiv 2507.18071, eq. 5 and 7). The gradient of s reaches all tokens of the sequence alike.
    - "gspo_token": with s as a number, times pi / pi as a constant (section 4.3): the same value, and
      the same gradient where A and weights are equal within a sequence; each token keeps its own A and
      weight.
    - "cispo": clip(rho, l, h) as a constant, times A ln pi (arXiv 2506.13585, eq. 4 and 5). No token
      loses its gradient.
    - "unclipped": rho A. With one update a step the gradient of REINFORCE.

    `dual_clip` c: where A < 0 the term is at least c A (arXiv 1912.09729, eq. 5); for "cispo" the
    constant is at most c there.

    The log of the ratio is limited to [-20, 20] before exp, as in verl, so that a token that ran away
    cannot overflow; beyond the limit its gradient is 0.

    Args:
        new, old, a: log-probs, old log-probs and advantages, 0 outside the mask.
        inside: bool.
        sequence: as in `sequence_sum`; needed for the GSPO kinds.
    """
    log_ratio = (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = _sequence_ratio(spec, new, old, inside, sequence) if "gspo" in spec.loss else log_ratio.exp()
    low, high, c = 1 - spec.clip_low, 1 + spec.clip_high, spec.dual_clip
    if spec.loss == "cispo":
        factor = ratio.detach().clamp(low, high)
        if c is not None:
            factor = torch.where(a < 0, factor.clamp(max=c), factor)
        objective = factor * a * new
    else:
        objective = ratio * a
        if spec.loss != "unclipped":
            objective = torch.minimum(objective, ratio.clamp(low, high) * a)
        if c is not None:
            objective = torch.where(a < 0, torch.maximum(objective, c * a), objective)
    return Surrogate(objective, ratio, log_ratio, _stopped(spec, ratio.detach(), a, low, high))


def _sequence_ratio(
    spec: ObjectiveSpec, new: Tensor, old: Tensor, inside: Tensor, sequence: Tensor | None
) -> Tensor:
    if sequence is None:
        raise ValueError(f"loss={spec.loss!r} needs to know which sequence a token belongs to")
    tokens = sequence_sum(inside, sequence).clamp(min=1)
    mean = sequence_sum(new - old, sequence) / tokens
    log_s = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).to(new.dtype)
    if spec.loss == "gspo_token":
        log_s = log_s.detach() + (new - new.detach())
    return log_s.exp()


def _stopped(spec: ObjectiveSpec, ratio: Tensor, a: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Where each bound holds: for "cispo" limits the factor, for the others stops the gradient."""
    below, above, nowhere = ratio < low, ratio > high, torch.zeros_like(ratio, dtype=torch.bool)
    if spec.loss == "unclipped":
        below = above = nowhere
    elif spec.loss != "cispo":
        below, above = (a < 0) & below, (a > 0) & above
    dual = (a < 0) & (ratio > spec.dual_clip) if spec.dual_clip is not None else nowhere
    return {"clip_low": below, "clip_high": above, "dual_clip": dual}
