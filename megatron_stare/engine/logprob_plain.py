"""What log_prob_and_entropy does with a block of logits, in plain torch: the reference for every kernel.

`logits_NB` are raw (no temperature), in the weight's dtype, and scratch: both functions may overwrite them.
`targets_N` count from the block's first column; a target outside the block is another block's. The
`logprob_triton` module has the same two functions.
"""

from __future__ import annotations

import torch


def accumulate(
    logits_NB: torch.Tensor, targets_N: torch.Tensor, scale: float, running_4N: torch.Tensor
) -> None:
    """Add a block to the running statistics, float32 [4, N]: the online softmax, with l = scale * logits.

    They are the largest l so far, m; sum e^(l-m); sum e^(l-m) (l-m); and l of the target, 0 until seen.
    """
    scaled_NB = _scaled(logits_NB, scale)
    local_N1, inside_N1 = _local(targets_N, scaled_NB.shape[1])
    picked_N1 = scaled_NB.gather(1, local_N1)
    running_4N[3] += torch.where(inside_N1, picked_N1, 0.0)[:, 0]
    rescale(running_4N, torch.maximum(running_4N[0], scaled_NB.amax(-1)))
    shifted_NB = scaled_NB.sub_(running_4N[0][:, None])
    weights_NB = shifted_NB.exp()
    running_4N[1] += weights_NB.sum(-1)
    running_4N[2] += shifted_NB.mul_(weights_NB).sum(-1)


def rescale(running_4N: torch.Tensor, largest_N: torch.Tensor) -> None:
    """Express the running sums relative to `largest_N`, at least the largest so far."""
    shift_N = running_4N[0] - largest_N
    factor_N = shift_N.exp()
    running_4N[2] += shift_N * running_4N[1]
    running_4N[1:3] *= factor_N
    running_4N[0] = largest_N


def gradient(
    logits_NB: torch.Tensor, targets_N: torch.Tensor, scale: float, rows_4N: torch.Tensor
) -> torch.Tensor:
    """d loss / d logits of a block, in the dtype of `logits_NB`: p (constant + slope ln p) + 1[y] at_target.

    `rows_4N` (float32) holds the log-partition, constant, slope and at_target of each row.
    """
    log_partition_N1, constant_N1, slope_N1, at_target_N1 = rows_4N[:, :, None]
    log_p_NB = _scaled(logits_NB, scale).sub_(log_partition_N1)
    if slope_N1.any():
        p_NB = log_p_NB.exp()
        grad_NB = torch.addcmul(constant_N1, log_p_NB, slope_N1, out=log_p_NB).mul_(p_NB)
    else:  # nobody asked for the entropy's gradient
        grad_NB = log_p_NB.exp_().mul_(constant_N1)
    local_N1, inside_N1 = _local(targets_N, grad_NB.shape[1])
    grad_NB.scatter_add_(1, local_N1, torch.where(inside_N1, at_target_N1, 0.0))
    return grad_NB.to(logits_NB.dtype)


def _scaled(logits_NB: torch.Tensor, scale: float) -> torch.Tensor:
    scaled_NB = logits_NB.float()
    # Apart from the subtraction that follows: fused with it, the largest would not be exactly itself.
    return scaled_NB if scale == 1.0 else scaled_NB.mul_(scale)


def _local(targets_N: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns to look at, [N, 1], and whether they are the target's."""
    inside_N = (targets_N >= 0) & (targets_N < columns)
    return torch.where(inside_N, targets_N, 0)[:, None], inside_N[:, None]
