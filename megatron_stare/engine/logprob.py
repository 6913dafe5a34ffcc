"""Log-probs and entropy of sampled tokens, from hidden states and the vocabulary-sharded output weight.

Only response rows are projected, a block of the vocabulary at a time, and the backward pass computes each
block's logits again, so the [tokens, vocabulary] matrix never exists at once. Blocks are cut along the
vocabulary and not along the tokens: each row of the weight is then read once a pass, and its gradient is
written once and in place, by one product over all tokens, where blocks of tokens would have to add theirs
up in float32. With l the logits over the temperature, p = softmax(l), Z the partition sum relative to the
largest logit m and S = sum exp(l - m) (l - m):

    log p_y = l_y - m - ln Z                  d log p_y / dl = 1[y] - p
    H       = ln Z - S / Z                    d H / dl       = -p (ln p + H)

Shapes: N response rows, H hidden, V this rank's part of the vocabulary, B columns of a block. What is done
with a block's logits is in `logprob_plain` and, for CUDA, in `logprob_triton`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_stare.engine import logprob_plain

_BLOCK_ELEMENTS = 1 << 24  # logits of one block: 64 MiB in float32
_BLOCK_MULTIPLE = 128  # columns; tensor cores want rows of logits that are aligned


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, group, vocab_start, vocab_valid, temperature):
        valid = min(max(vocab_valid - vocab_start, 0), weight_VH.shape[0])
        scale, kernels = 1.0 / temperature, _kernels_for(hidden_NH)
        running_4N = _nothing_seen(hidden_NH)
        for columns in _blocks(hidden_NH.shape[0], valid):
            logits_NB = hidden_NH @ weight_VH[columns].t()
            kernels.accumulate(logits_NB, targets_N - (vocab_start + columns.start), scale, running_4N)
            del logits_NB  # before the next block is made
        if group is not None and group.size() > 1:
            _combine(running_4N, group)
        out_2N, log_partition_N = _finish(running_4N)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, log_partition_N, out_2N)
        ctx.vocab_start, ctx.valid, ctx.scale = vocab_start, valid, scale
        return out_2N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_2N):
        hidden_NH, weight_VH, targets_N, log_partition_N, out_2N = ctx.saved_tensors
        kernels = _kernels_for(hidden_NH)
        grad_logp_N, grad_entropy_N = grad_2N * ctx.scale
        # d loss / d l = p (constant + slope ln p) + 1[y] at_target, with the same three numbers for a row.
        rows_4N = torch.stack(
            [log_partition_N, -grad_logp_N - grad_entropy_N * out_2N[1], -grad_entropy_N, grad_logp_N]
        )
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if wants_hidden else None
        grad_weight_VH = torch.empty_like(weight_VH) if wants_weight else None
        for columns in _blocks(hidden_NH.shape[0], ctx.valid):
            weight_BH = weight_VH[columns]
            logits_NB = hidden_NH @ weight_BH.t()
            local_N = targets_N - (ctx.vocab_start + columns.start)
            grad_NB = kernels.gradient(logits_NB, local_N, ctx.scale, rows_4N)
            if wants_hidden:
                _add_product(grad_hidden_NH, grad_NB, weight_BH)
            if wants_weight:
                torch.mm(grad_NB.t(), hidden_NH, out=grad_weight_VH[columns])
            del logits_NB, grad_NB
        if wants_weight:
            grad_weight_VH[ctx.valid :] = 0  # padding has no probability
        if wants_hidden:
            grad_hidden_NH = grad_hidden_NH.to(hidden_NH.dtype)
        return grad_hidden_NH, grad_weight_VH, None, None, None, None, None


def log_prob_and_entropy(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Log-prob of each target and entropy of its distribution (nats), float32 [2, N], both with gradient.

    `weight_VH` holds the ranks' equal parts of the padded vocabulary in rank order; ids from `vocab_size`
    on are padding and have no probability, and no target may be one. `hidden_NH` is equal on all ranks of
    `group`, and its gradient is this rank's part, to be summed over the group by the caller's copy or gather
    region. Beside the gradients it takes the memory of a few blocks of logits of 64 MiB each.
    """
    rank = group.rank() if group is not None else 0
    return _LogProbEntropy.apply(
        hidden_NH, weight_VH, targets_N, group, rank * weight_VH.shape[0], vocab_size, temperature
    )


def _kernels_for(tensor: torch.Tensor) -> ModuleType:
    """The one choice of kernels: Triton's on CUDA, where Triton is installed, else plain torch."""
    return _triton() if tensor.is_cuda and _triton() is not None else logprob_plain


@functools.cache
def _triton() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("megatron_stare.engine.logprob_triton")


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    """Cut the columns so that a block of `rows` stays within the budget, or has the fewest columns."""
    size = max(1, _BLOCK_ELEMENTS // max(rows, 1) // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE
    for start in range(0, columns, size):
        yield slice(start, min(start + size, columns))


def _nothing_seen(hidden_NH: torch.Tensor) -> torch.Tensor:
    """Running statistics of no column: largest logit, sum e^(l-m), sum e^(l-m) (l-m), the target's logit.

    A shard may hold padding only: its largest is finite, so that what follows is 0 and not NaN, and never
    wins.
    """
    running_4N = hidden_NH.new_zeros((4, hidden_NH.shape[0]), dtype=torch.float32)
    running_4N[0] = torch.finfo(torch.float32).min
    return running_4N


def _combine(running_4N: torch.Tensor, group: dist.ProcessGroup) -> None:
    largest_N = running_4N[0].clone()
    dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
    logprob_plain.rescale(running_4N, largest_N)
    dist.all_reduce(running_4N[1:], group=group)


def _finish(running_4N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy [2, N], and the log-partition [N]."""
    largest_N, total_N, weighted_N, target_N = running_4N
    log_total_N = total_N.log()
    # Rounding may not make a probability larger than 1: ratios would explode where nothing happened.
    log_p_N = (target_N - largest_N - log_total_N).clamp_(max=0.0)
    entropy_N = (log_total_N - weighted_N / total_N).clamp_(min=0.0)
    return torch.stack([log_p_N, entropy_N]), largest_N + log_total_N


def _add_product(sum_NH: torch.Tensor, grad_NB: torch.Tensor, weight_BH: torch.Tensor) -> None:
    if weight_BH.dtype == sum_NH.dtype:
        sum_NH.addmm_(grad_NB, weight_BH)
    else:
        sum_NH.add_(grad_NB @ weight_BH)
