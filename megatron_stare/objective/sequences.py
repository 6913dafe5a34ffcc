"""Sums over the tokens of each sequence of a packed microbatch."""

from __future__ import annotations

from torch import Tensor


def sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """For each token the sum of `values` over its sequence; float64, shaped like `values`, with gradient.

    Float64, because on a GPU the order of such a sum changes from run to run: what is rounded to float32
    afterwards is then the same number.

    Args:
        values: any shape, 0 where a token does not count.
        sequence: int64, shaped alike: which sequence a token belongs to, from 0.
    """
    flat, index = values.reshape(-1).double(), sequence.reshape(-1)
    count = int(index.max()) + 1 if index.numel() else 0
    sums = flat.new_zeros(count).index_add(0, index, flat)
    return sums[index].view(values.shape)
