"""Losses of one microbatch, as sums over its masked tokens.

Sums, never means: the caller divides by N of the global batch (`normalization`), so that the result depends
neither on how tokens are spread over microbatches and ranks nor on some of them having none. The general
form, of which every objective is a special case:

    sum over masked tokens of  multiplier * [ - w * keep * c * J(A + added A)      policy term
                                              + kl_coef * KL to the reference
                                              + kl_coef of the token * KL to the start of the step
                                              - entropy_coef * H ]

w: STARE's weights. keep, added A and the token's kl_coef: `TokenTerms` of an entropy control. c: the rollout
correction. J: `surrogate`. What is not used is left out, not multiplied by 1: a spec without any of it is
`policy_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_stare.objective.kl import kl_estimate
from megatron_stare.objective.rollout_correction import Correction, rollout_correction
from megatron_stare.objective.spec import ObjectiveSpec
from megatron_stare.objective.surrogate import surrogate
from megatron_stare.objective.tensors import check_shapes, masked
from megatron_stare.objective.terms import TokenTerms


@dataclass(frozen=True)
class PolicyLoss:
    """A loss to be minimised and what is worth knowing about it, both as sums over masked tokens."""

    loss_sum: Tensor  # scalar, with gradient
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached float64 scalars


def objective_loss(
    spec: ObjectiveSpec,
    log_probs: Tensor,
    entropy: Tensor | None,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor | None = None,
    weights: Tensor | None = None,
    sampler_log_probs: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    terms: TokenTerms | None = None,
    multipliers: Tensor | None = None,
) -> PolicyLoss:
    """The loss as a sum over masked tokens; divide by the global N of `normalization`.

    Sums over any split of the batch into parts of whole sequences add up to the loss of the batch; for
    losses without `spec.needs_sequence` sequences may be split too.

    Args:
        log_probs: any shape, usually [tokens]; float32 or float64 with gradient, halves are widened.
        entropy: of each token's distribution; with gradient if `spec.entropy_coef` > 0, else not used.
        old_log_probs, advantages: policy at the start of the step, and A; constants.
        mask: bool or 0/1. Whatever the other tensors hold outside it, even inf or NaN, reaches neither
            the loss nor its gradient.
        sequence: int64, which sequence of this microbatch a token belongs to, from 0.
        weights: STARE's; None is bit-identical to all ones.
        sampler_log_probs: what the sampler gave, for the rollout correction.
        reference_log_probs: of the reference policy; with `spec.kl_coef` 0 they give a metric only.
        terms: an entropy control's, cut to this microbatch.
        multipliers: of the normalisation; None is bit-identical to all ones.
        All tensors are shaped like `log_probs`.

    Returns:
        loss_sum, and float64 sums over masked tokens, of which `multipliers` are no part:
        "ratio", rho; "clip_low", "clip_high", "dual_clip", tokens at that bound; "approx_kl",
        rho - 1 - ln rho by token, an estimator of KL(old || new) that is never negative.
        With a reference "reference_kl", the estimate. With an entropy bonus "entropy". With a
        correction "correction_ratio" and "correction_weight", before and after the cap, and
        "correction_changed", tokens truncated or masked. With terms "control_weight",
        "control_advantage" and "control_kl" (coefficient times KL), as far as there are any.

    Raises:
        ValueError: unequal shapes; a tensor that `spec` needs is missing, or an entropy without gradient
            for an entropy bonus.
    """
    check_shapes(
        log_probs,
        entropy=entropy,
        old_log_probs=old_log_probs,
        advantages=advantages,
        mask=mask,
        sequence=sequence,
        weights=weights,
        sampler_log_probs=sampler_log_probs,
        reference_log_probs=reference_log_probs,
        multipliers=multipliers,
        **{f"terms.{name}": value for name, value in (terms.items() if terms is not None else ())},
    )
    _check_present(spec, log_probs, entropy, sequence, sampler_log_probs, reference_log_probs)
    inside = mask != 0
    # Before any arithmetic: inf - inf outside the mask would be NaN, and NaN * 0 stays NaN.
    new = masked(log_probs, inside)
    old = masked(old_log_probs.detach(), inside)
    a = masked(advantages.detach(), inside)
    index = torch.where(inside, sequence, 0) if sequence is not None else None
    metrics: dict[str, Tensor] = {}

    if terms is not None and terms.advantage is not None:
        metrics["control_advantage"] = masked(terms.advantage, inside)
        a = a + metrics["control_advantage"]
    term = surrogate(spec, new, old, a, inside, index)
    objective = term.objective
    if weights is not None:
        objective = objective * masked(weights.detach(), inside)
    if terms is not None and terms.weight is not None:
        metrics["control_weight"] = masked(terms.weight, inside)
        objective = objective * metrics["control_weight"]
    if spec.correction != "none":
        correction = _correct(spec, old, masked(sampler_log_probs.detach(), inside), index)
        objective = objective * correction.weight
        metrics["correction_ratio"] = correction.ratio
        metrics["correction_weight"] = correction.weight
        metrics["correction_changed"] = correction.changed

    loss = -objective
    if reference_log_probs is not None:
        kl = kl_estimate(spec.kl_estimator, new, masked(reference_log_probs, inside))
        metrics["reference_kl"] = kl.detach()
        if spec.kl_coef > 0:
            loss = loss + spec.kl_coef * kl
    if terms is not None and terms.kl_coef is not None:
        penalty = masked(terms.kl_coef, inside) * kl_estimate(spec.old_kl, new, old)
        metrics["control_kl"] = penalty.detach()
        loss = loss + penalty
    if spec.entropy_coef > 0:
        h = masked(entropy, inside)
        metrics["entropy"] = h.detach()
        loss = loss - spec.entropy_coef * h
    if multipliers is not None:
        loss = loss * masked(multipliers, inside)
    loss_sum = torch.where(inside, loss, 0).sum()

    with torch.no_grad():
        metrics["ratio"] = term.ratio
        metrics["approx_kl"] = torch.expm1(term.log_ratio) - term.log_ratio
        metrics.update(term.stopped)
        sums = {name: torch.where(inside, each, 0).sum(dtype=torch.float64) for name, each in metrics.items()}
    return PolicyLoss(loss_sum, sums)


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

    `objective_loss` with nothing but the loss "ppo_clip", that is PPO's, GRPO's or DAPO's loss, and
    STARE's weights. Arguments, metrics and errors as there.
    """
    spec = ObjectiveSpec(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return objective_loss(spec, log_probs, None, old_log_probs, advantages, mask, weights=weights)


def sft_loss(log_probs: Tensor, mask: Tensor) -> PolicyLoss:
    """Negative log-likelihood of the masked tokens, as a sum; arguments as in `objective_loss`."""
    check_shapes(log_probs, mask=mask)
    return PolicyLoss(masked(-log_probs, mask != 0).sum())


def _correct(spec: ObjectiveSpec, old: Tensor, sampler: Tensor, sequence: Tensor | None) -> Correction:
    return rollout_correction(
        spec.correction,
        old,
        sampler,
        level=spec.correction_level,
        cap=spec.correction_cap,
        floor=spec.correction_floor,
        sequence=sequence,
    )


def _check_present(spec, log_probs, entropy, sequence, sampler_log_probs, reference_log_probs) -> None:
    if spec.needs_sequence and sequence is None:
        what = f"loss={spec.loss!r}" if "gspo" in spec.loss else "correction_level='sequence'"
        raise ValueError(f"{what} needs `sequence`: which sequence a token belongs to")
    if spec.needs_sampler_log_probs and sampler_log_probs is None:
        raise ValueError(f"correction={spec.correction!r} needs `sampler_log_probs`: there are none")
    if spec.needs_reference and reference_log_probs is None:
        raise ValueError(f"kl_coef={spec.kl_coef} needs `reference_log_probs`")
    if spec.needs_entropy_gradient:
        if entropy is None:
            raise ValueError(f"entropy_coef={spec.entropy_coef} needs `entropy`")
        if log_probs.requires_grad and not entropy.requires_grad:
            raise ValueError(f"entropy_coef={spec.entropy_coef} needs an entropy with gradient: it has none")
