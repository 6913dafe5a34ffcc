"""Advantages: how much better a response is than was to be expected.

Every estimator is a function of the rewards of a whole step, [groups, responses]: never of one rank's
part, so that no layout can change it.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "w_reinforce"]

# Rewards that differ by less than this, relative to the largest, are one reward with rounding noise.
_NOISE = 4 * torch.finfo(torch.float32).eps


def advantages(
    kind: AdvantageKind, rewards: Tensor, *, lengths: Tensor | None = None, positive_weight: float = 0.1
) -> Tensor:
    """The advantage of each response by the estimator `kind`; shapes and errors as `grpo_advantages`.

    Args:
        kind: "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline" or "w_reinforce".
        rewards: [groups, responses] of the whole step.
        lengths: [groups, responses], response tokens; only the two reinforce_pp kinds look at it.
        positive_weight: lambda of "w_reinforce"; the others do not look at it.

    Raises:
        ValueError: unknown kind, or what the estimator itself refuses.
    """
    match kind:
        case "grpo":
            return grpo_advantages(rewards)
        case "dr_grpo":
            return grpo_advantages(rewards, normalize_std=False)
        case "rloo":
            return rloo_advantages(rewards)
        case "reinforce_pp":
            return reinforce_pp_advantages(rewards, lengths=lengths)
        case "reinforce_pp_baseline":
            return reinforce_pp_advantages(rewards, group_baseline=True, lengths=lengths)
        case "w_reinforce":
            return w_reinforce_advantages(rewards, positive_weight=positive_weight)
    raise ValueError(f"advantage {kind!r} is none of {', '.join(get_args(AdvantageKind))}")


@torch.no_grad()
def grpo_advantages(rewards: Tensor, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages: (r - mean) / (std + eps), over the responses to each prompt.

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2); without the division Dr. GRPO
    (arXiv 2503.20783, section 3.2). The std is the unbiased one (over n - 1) and eps
    1e-6, as in verl (`compute_grpo_outcome_advantage`), whose scale published learning
    rates assume; the other one would make advantages of 8 responses 7 % larger.

    A group of equal rewards gets exactly 0: their mean may differ from them in the last
    bit, and dividing by eps would turn that noise into a signal.

    Args:
        rewards: [groups, responses], any real dtype, at least 2 responses.
        normalize_std: divide by the group's std.
        eps: added to the std.

    Returns:
        Shaped like `rewards`; same dtype if floating, else float32. Computed in float64.

    Raises:
        ValueError: wrong shape, fewer than 2 responses, or a reward that is not finite.
    """
    r = _checked(rewards, least=2)
    centred = _centred(r)
    if normalize_std and r.shape[0] > 0:
        centred = centred / (r.std(dim=1, keepdim=True) + eps)
    return centred.to(_dtype(rewards))


@torch.no_grad()
def rloo_advantages(rewards: Tensor) -> Tensor:
    """Leave-one-out: r minus the mean reward of the *other* responses to the same prompt.

    RLOO (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; for language
    models arXiv 2402.14740). Equal to n / (n - 1) (r - mean), which is how it is computed.
    A group of equal rewards gets exactly 0. Shapes and errors as `grpo_advantages`.
    """
    r = _checked(rewards, least=2)
    n = r.shape[1]
    return (_centred(r) * (n / (n - 1))).to(_dtype(rewards))


@torch.no_grad()
def reinforce_pp_advantages(
    rewards: Tensor, *, group_baseline: bool = False, lengths: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """REINFORCE++: rewards normalised by mean and std over the whole batch, (x - mean) / (std + eps).

    arXiv 2501.03262 with an outcome reward, no discount and no KL in the reward: then every token of a
    response has the same return x, its reward, or with `group_baseline` (the paper's "w/ baseline") its
    reward less the group's mean. The std is the unbiased one.

    The paper takes mean and std over the batch's *tokens*: with `lengths` each response counts as often
    as it has tokens, as in verl and OpenRLHF. Without, each response counts once. Only then is the mean
    of the centred rewards 0, and with `group_baseline` a group of equal rewards exactly 0; without a
    baseline, or by tokens, such a group has an advantage by definition. If x is equal in the whole
    batch, all is exactly 0.

    Args:
        rewards: [groups, responses]; one response a group is enough without `group_baseline`.
        lengths: [groups, responses], response tokens, at least 0; None to count responses.

    Raises:
        ValueError: as `grpo_advantages`, or lengths of another shape or below 0.
    """
    r = _checked(rewards, least=2 if group_baseline else 1)
    x = _centred(r) if group_baseline else r
    share = torch.ones_like(x) if lengths is None else _checked_lengths(lengths, rewards)
    counted = share > 0
    n = share.sum()
    if not counted.any() or _equal(x[counted]):
        return torch.zeros_like(x).to(_dtype(rewards))
    mean = (share * x).sum() / n
    if group_baseline and lengths is None:
        mean = torch.zeros_like(mean)  # what it is but for rounding
    variance = (share * (x - mean).square()).sum() / (n - 1).clamp(min=1)
    return ((x - mean) / (variance.sqrt() + eps)).to(_dtype(rewards))


@torch.no_grad()
def w_reinforce_advantages(rewards: Tensor, *, positive_weight: float = 0.1) -> Tensor:
    """W-REINFORCE: `positive_weight` (lambda) for a right response, -1 for a wrong one; no baseline.

    arXiv 2506.01347, section 5: lambda times the objective of positive samples plus that of negative
    ones; lambda 0.1 in the paper, 1 is REINFORCE on +1/-1 rewards, 0 only negative samples (NSR).
    A response is right if its reward is above 0, so 0/1 and -1/+1 rewards mean the same; a graded
    reward counts as right whenever it is above 0.

    A group of equal rewards is not 0 here: learning from prompts that are always failed is part of the
    method (and lost with dynamic sampling).

    Raises:
        ValueError: wrong shape, a reward that is not finite, positive_weight below 0.
    """
    if not 0 <= positive_weight < float("inf"):
        raise ValueError(f"positive_weight={positive_weight} is not a finite number of at least 0")
    r = _checked(rewards, least=1)
    return torch.where(r > 0, r.new_tensor(positive_weight), r.new_tensor(-1.0)).to(_dtype(rewards))


def _checked(rewards: Tensor, least: int) -> Tensor:
    """`rewards` as float64 [groups, responses], or ValueError."""
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be [groups, responses], not of shape {tuple(rewards.shape)}")
    if rewards.shape[1] < least:
        need = f"at least {least} are needed" + (" to compare them" if least > 1 else "")
        raise ValueError(f"{rewards.shape[1]} responses a group: {need}")
    r = rewards.double()
    if not r.isfinite().all():
        group, response = (~r.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"reward of group {group}, response {response} is {r[group, response].item()}")
    return r


def _checked_lengths(lengths: Tensor, rewards: Tensor) -> Tensor:
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}, rewards {tuple(rewards.shape)}")
    if (lengths < 0).any():
        raise ValueError(f"a length is {int(lengths.min())}, below 0")
    return lengths.double()


def _dtype(rewards: Tensor) -> torch.dtype:
    return rewards.dtype if rewards.is_floating_point() else torch.float32


def _centred(r: Tensor) -> Tensor:
    """r minus its row's mean; exactly 0 in rows that are equal but for rounding noise."""
    if r.shape[0] == 0:
        return r
    spread = r.amax(dim=1, keepdim=True) - r.amin(dim=1, keepdim=True)
    equal = spread <= _NOISE * r.abs().amax(dim=1, keepdim=True)
    return torch.where(equal, 0.0, r - r.mean(dim=1, keepdim=True))


def _equal(x: Tensor) -> bool:
    """Whether all of x is one number but for rounding noise."""
    return bool(x.max() - x.min() <= _NOISE * x.abs().max())
