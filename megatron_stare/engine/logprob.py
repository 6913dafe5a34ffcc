"""Log-probs and entropy of sampled tokens, from hidden states and the vocabulary-sharded output weight.

Only response rows are projected, a chunk of rows at a time, and the backward pass computes each chunk's
logits again, so the [tokens, vocabulary] matrix never exists at once. With l the logits over the
temperature, p = softmax(l), Z the partition sum relative to the largest logit m and S = sum p (l - m):

    log p_y = l_y - m - ln Z                  d log p_y / dl = 1[y] - p
    H       = ln Z - S                        d H / dl       = -p (ln p + H)

Shapes: N response rows, C rows of a chunk, H hidden, V this rank's part of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_CHUNK_ELEMENTS = 1 << 24  # logits of one chunk: 64 MiB in float32


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, group, vocab_start, vocab_valid, temperature):
        shard = _Shard(weight_VH, group, vocab_start, vocab_valid, temperature)
        out = hidden_NH.new_empty((2, hidden_NH.shape[0]), dtype=torch.float32)
        log_partition_N = torch.empty_like(out[0])
        for rows in shard.chunks(hidden_NH.shape[0]):
            logits_CV = shard.logits(hidden_NH[rows])
            out[0, rows], out[1, rows], log_partition_N[rows] = shard.statistics(logits_CV, targets_N[rows])
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, log_partition_N, out[1].clone())
        ctx.shard = shard
        return out

    @staticmethod
    def backward(ctx, grad_2N):
        hidden_NH, weight_VH, targets_N, log_partition_N, entropy_N = ctx.saved_tensors
        shard = ctx.shard
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for rows in shard.chunks(hidden_NH.shape[0]):
            log_p_CV = shard.logits(hidden_NH[rows]) - log_partition_N[rows, None]
            p_CV = log_p_CV.exp()
            grad_logp_C1, grad_entropy_C1 = grad_2N[0, rows, None], grad_2N[1, rows, None]
            # exp(-inf) is 0, but 0 * -inf is not: rows of the padded vocabulary stay at 0.
            log_p_CV.masked_fill_(p_CV == 0, 0.0).add_(entropy_N[rows, None]).mul_(grad_entropy_C1)
            grad_CV = -p_CV * (grad_logp_C1 + log_p_CV)
            shard.add_at_targets(grad_CV, targets_N[rows], grad_logp_C1[:, 0])
            grad_CV = (grad_CV / shard.temperature).to(weight_VH.dtype)
            grad_hidden_NH[rows] = grad_CV @ weight_VH
            grad_weight_VH += (grad_CV.t() @ hidden_NH[rows]).float()
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None, None


class _Shard:
    """One tensor-parallel rank's rows of the output weight, and what is computed with them."""

    def __init__(self, weight_VH, group, vocab_start, vocab_valid, temperature):
        self.weight_VH, self.group, self.temperature = weight_VH, group, temperature
        self.start, self.size = vocab_start, weight_VH.shape[0]
        self.valid = min(max(vocab_valid - vocab_start, 0), self.size)
        self.parallel = group is not None and group.size() > 1

    def chunks(self, rows: int):
        size = max(1, _CHUNK_ELEMENTS // self.size)
        return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]

    def logits(self, hidden_CH):
        logits_CV = (hidden_CH @ self.weight_VH.t()).float() / self.temperature
        logits_CV[:, self.valid :] = float("-inf")
        return logits_CV

    def statistics(self, logits_CV, targets_C):
        """Log-prob, entropy and log-partition of a chunk over the whole vocabulary, each [C]."""
        # A shard may hold padding only; its maximum must not win.
        largest_C = logits_CV.amax(-1)
        if self.parallel:
            dist.all_reduce(largest_C, dist.ReduceOp.MAX, group=self.group)
        shifted_CV = logits_CV - largest_C[:, None]
        weights_CV = shifted_CV.exp()
        local_C, inside_C = self._local(targets_C)
        picked_C = shifted_CV.gather(1, local_C[:, None])[:, 0]
        sums_3C = torch.stack(
            [
                weights_CV.sum(-1),
                (weights_CV * shifted_CV.masked_fill(weights_CV == 0, 0.0)).sum(-1),
                torch.where(inside_C, picked_C, 0.0),
            ]
        )
        if self.parallel:
            dist.all_reduce(sums_3C, group=self.group)
        log_z_C = sums_3C[0].log()
        return sums_3C[2] - log_z_C, log_z_C - sums_3C[1] / sums_3C[0], largest_C + log_z_C

    def add_at_targets(self, grad_CV, targets_C, values_C):
        local_C, inside_C = self._local(targets_C)
        grad_CV.scatter_add_(1, local_C[:, None], torch.where(inside_C, values_C, 0.0)[:, None])

    def _local(self, targets_C):
        local_C = targets_C - self.start
        inside_C = (local_C >= 0) & (local_C < self.size)
        return torch.where(inside_C, local_C, 0), inside_C


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
    on are padding and have no probability. `hidden_NH` is equal on all ranks of `group`, and its gradient
    is this rank's part, to be summed over the group by the caller's copy or gather region.
    """
    rank = group.rank() if group is not None else 0
    return _LogProbEntropy.apply(
        hidden_NH, weight_VH, targets_N, group, rank * weight_VH.shape[0], vocab_size, temperature
    )
