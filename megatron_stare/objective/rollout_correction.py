"""Correction for responses that were sampled from slightly other probabilities than the trainer's.

The sampler computes the same model with other kernels and precision, so a token was drawn from mu and not
from the trainer's pi_old. The importance ratio pi_old / mu corrects for it in expectation; its large values
are truncated or dropped, since their variance does more harm than the bias that this brings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.objective.kl import LOG_RATIO_LIMIT
from megatron_stare.objective.sequences import sequence_sum

CorrectionKind = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence"]


@dataclass(frozen=True)
class Correction:
    """Factors of the policy objective, all shaped like the log-probs and without gradient."""

    weight: Tensor  # what multiplies a token's objective
    ratio: Tensor  # the ratio before it was truncated or masked
    changed: Tensor  # bool: truncated or masked


@torch.no_grad()
def rollout_correction(
    kind: CorrectionKind,
    old_log_probs: Tensor,
    sampler_log_probs: Tensor,
    *,
    level: CorrectionLevel = "token",
    cap: float = 2.0,
    floor: float = 0.0,
    sequence: Tensor | None = None,
) -> Correction:
    """Truncated or masked importance ratio exp(old_log_probs - sampler_log_probs).

    - "truncate": min(ratio, cap). TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
      You Off-Policy RL Training").
    - "mask": the ratio where floor <= ratio <= cap, else 0. By token IcePop (Ling team 2025, "Small Leak
      Can Sink a Great Ship": floor 0.5, cap 5), by sequence MIS (Liu, Li et al. 2025, "When Speed Kills
      Stability": cap 2, no floor).

    With level "sequence" a token's ratio is that of its whole response: the product over its tokens.
    The log of the ratio is limited to [-20, 20]. A NaN stays one. A masked token stays in the number of
    tokens that the loss is divided by.

    Args:
        old_log_probs, sampler_log_probs: equal shapes, nats, 0 in both where a token does not count.
        sequence: int64, shaped alike, from 0; needed for level "sequence".

    Raises:
        ValueError: a kind other than "truncate" and "mask", or no `sequence` where it is needed.
    """
    log_ratio = old_log_probs - sampler_log_probs
    if level == "sequence":
        if sequence is None:
            raise ValueError("a correction by sequence needs to know which sequence a token belongs to")
        log_ratio = sequence_sum(log_ratio, sequence).to(log_ratio.dtype)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    match kind:
        case "truncate":
            return Correction(ratio.clamp(max=cap), ratio, ratio > cap)
        case "mask":
            outside = (ratio > cap) | (ratio < floor)
            return Correction(torch.where(outside, 0, ratio), ratio, outside)
    raise ValueError(f"rollout correction {kind!r} is none of truncate, mask")
