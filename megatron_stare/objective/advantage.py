"""Advantages: how much better a response is than the others to the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

# Rewards that differ by less than this, relative to the largest, are one reward with rounding noise.
_NOISE = 4 * torch.finfo(torch.float32).eps


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
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be [groups, responses], not of shape {tuple(rewards.shape)}")
    if rewards.shape[1] < 2:
        raise ValueError(f"{rewards.shape[1]} responses a group: at least 2 are needed to compare them")
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.shape[0] == 0:
        return rewards.to(dtype)
    r = rewards.double()
    if not r.isfinite().all():
        group, response = (~r.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"reward of group {group}, response {response} is {r[group, response].item()}")
    centred = r - r.mean(dim=1, keepdim=True)
    if normalize_std:
        centred = centred / (r.std(dim=1, keepdim=True) + eps)
    spread = r.amax(dim=1, keepdim=True) - r.amin(dim=1, keepdim=True)
    equal = spread <= _NOISE * r.abs().amax(dim=1, keepdim=True)
    return torch.where(equal, 0.0, centred).to(dtype)
