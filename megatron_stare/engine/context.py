"""Context parallelism: which tokens of packed sequences a rank holds, and how whole sequences are seen again.

Every sequence is padded to a multiple of 2 * size and cut into 2 * size chunks; rank r holds chunks r and
2 * size - 1 - r, one behind the other. So each rank has the same number of tokens, and the same number of
(query, key) pairs under a causal mask. Transformer Engine and Megatron's rotary embedding expect this order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Context:
    """This rank's place among the ranks that share sequences; by default it has them alone."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def multiple(self) -> int:
        """What the length of every sequence must be a multiple of."""
        return 2 * self.size if self.size > 1 else 1

    @property
    def chunks(self) -> list[int]:
        """Numbers of the chunks that this rank holds, of `multiple` in each sequence."""
        return [self.rank, 2 * self.size - 1 - self.rank] if self.size > 1 else [0]

    def padded(self, length: int) -> int:
        """Tokens that a sequence of `length` takes, over all ranks."""
        return -(-length // self.multiple) * self.multiple

    def own_rows(self, lengths: list[int]) -> np.ndarray:
        """This rank's rows (int64) of sequences with these padded lengths laid end to end, in its order."""
        rows, start = [np.zeros(0, dtype=np.int64)], 0
        for length in lengths:
            chunk = length // self.multiple
            rows += [np.arange(start + i * chunk, start + (i + 1) * chunk) for i in self.chunks]
            start += length
        return np.concatenate(rows)


# Without context parallelism.
WHOLE = Context()


@dataclass(frozen=True)
class OwnTokens:
    """The response tokens of a packed microbatch that this rank holds.

    `index` (int64 [N]) is each one's place among the `count` response tokens of all context-parallel ranks,
    sequence after sequence.
    """

    context: Context
    index: torch.Tensor
    count: int

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Values of this rank's tokens ([..., N]) to those of all ([..., count]); with gradient, collective.

        Each rank may compute the same loss from them: divide it by `context.size`, as the gradient is
        summed over the ranks.
        """
        if self.context.size == 1:
            return values
        room = values.new_zeros((*values.shape[:-1], self.count))
        return _SumOverRanks.apply(room.index_copy(-1, self.index, values), self.context.group)


class _SumOverRanks(torch.autograd.Function):
    """An all-reduce whose gradient is one, too: torch's own carries none."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        total = values.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
