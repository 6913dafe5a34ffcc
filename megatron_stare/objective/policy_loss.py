"""Losses of one microbatch, as sums over its masked tokens.

Sums, never means: the caller divides by the token count of the global batch, so
that the result depends neither on how tokens are spread over microbatches and
ranks nor on some of them having none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# exp(20) is 5e8: far outside any clip range, far inside float32.
_LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """A loss to be minimised and what is worth knowing about it, both as sums over masked tokens."""

    loss_sum: Tensor  # scalar, with gradient
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached float64 scalars


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clipped policy-gradient loss, -sum of weight * min(rho A, clip(rho, 1-clip_low, 1+clip_high) A).

    rho = exp(log_probs - old_log_probs). Equal clips are PPO's (arXiv 1707.06347, eq. 7)
    and GRPO's, clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476, section
    3.1). `dual_clip` c bounds the objective from below by c * A where A < 0 (arXiv
    1912.09729, eq. 5).

    The log ratio is limited to [-20, 20] before exp, as in verl, so that a token that
    ran away cannot overflow; beyond the limit its gradient is 0.

    Args:
        log_probs: any shape, with gradient. float32 or float64; halves are widened.
        old_log_probs, advantages: shaped alike, taken as constants.
        mask: shaped alike, bool or 0/1. Whatever the other tensors hold outside it, even
            inf or NaN, reaches neither the loss nor its gradient.
        weights: shaped alike (STARE's); None is bit-identical to all ones.
        clip_low, clip_high: 0 <= clip_low < 1, clip_high >= 0.
        dual_clip: above 1; None for off.

    Returns:
        metrics: "ratio", sum of rho; "clip_low", "clip_high", "dual_clip", numbers of
        tokens whose gradient that bound stops; "approx_kl", sum of rho - 1 - ln rho, an
        estimator of KL(old || new) that is never negative.

    Raises:
        ValueError: unequal shapes, or a bound out of range.
    """
    _check_shapes(log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask, weights=weights)
    _check_bounds(clip_low, clip_high, dual_clip)
    inside = mask != 0
    # Before any arithmetic: inf - inf outside the mask would be NaN, and NaN * 0 stays NaN.
    new = _masked(log_probs, inside)
    old = _masked(old_log_probs.detach(), inside)
    a = _masked(advantages.detach(), inside)

    log_ratio = (new - old).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)
    if dual_clip is not None:
        objective = torch.where(a < 0, torch.maximum(objective, dual_clip * a), objective)
    if weights is not None:
        objective = objective * _masked(weights.detach(), inside)
    loss_sum = torch.where(inside, -objective, 0).sum()

    with torch.no_grad():
        metrics = {
            "ratio": torch.where(inside, ratio, 0),
            "clip_low": inside & (a < 0) & (ratio < 1 - clip_low),
            "clip_high": inside & (a > 0) & (ratio > 1 + clip_high),
            "dual_clip": inside & (a < 0) & (ratio > (dual_clip if dual_clip is not None else torch.inf)),
            "approx_kl": torch.where(inside, torch.expm1(log_ratio) - log_ratio, 0),
        }
        return PolicyLoss(loss_sum, {key: value.sum(dtype=torch.float64) for key, value in metrics.items()})


def sft_loss(log_probs: Tensor, mask: Tensor) -> PolicyLoss:
    """Negative log-likelihood of the masked tokens, as a sum; `log_probs` and `mask` as in `policy_loss`."""
    _check_shapes(log_probs, mask=mask)
    return PolicyLoss(_masked(-log_probs, mask != 0).sum())


def _masked(tensor: Tensor, inside: Tensor) -> Tensor:
    """At least float32, 0 outside the mask; the gradient outside is exactly 0 too."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return torch.where(inside, wide, 0)


def _check_shapes(log_probs: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != log_probs.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, log_probs {tuple(log_probs.shape)}")


def _check_bounds(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0 <= clip_low < 1:
        raise ValueError(f"clip_low={clip_low} is not in [0, 1)")
    if not clip_high >= 0:
        raise ValueError(f"clip_high={clip_high} is negative")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip} is not above 1")
