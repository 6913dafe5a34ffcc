"""Matrix products on a CPU whose rows are the same to the bit whatever rows are beside them.

A library chooses its kernel by the number of rows, and kernels add up in different
orders. So the rows are multiplied in blocks of one size, the last one filled up. Where
the sum of a row does not depend on its place in a block (tested), a response is then
the same alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK_ROWS = 32
_library: torch.library.Library | None = None


def mm(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """left @ right, in blocks of BLOCK_ROWS rows. [M, N]."""
    return _by_blocks(left_MK, right_KN, torch.mm)


def addmm(
    bias: torch.Tensor, left_MK: torch.Tensor, right_KN: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """beta * bias + alpha * (left @ right), as mm(). `bias` is [N], or anything that fits [M, N]."""
    if bias.dim() < 2:

        def product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
            return torch.addmm(bias, left, right, beta=beta, alpha=alpha, out=out)

        return _by_blocks(left_MK, right_KN, product)
    return alpha * mm(left_MK, right_KN) + beta * bias


def _by_blocks(
    left_MK: torch.Tensor, right_KN: torch.Tensor, product: Callable[..., torch.Tensor]
) -> torch.Tensor:
    rows = left_MK.shape[0]
    padding = -rows % BLOCK_ROWS
    if padding:
        left_MK = torch.cat([left_MK, left_MK.new_zeros(padding, left_MK.shape[1])])
    out_MN = left_MK.new_empty(rows + padding, right_KN.shape[1])
    for start in range(0, rows, BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        product(left_MK[block], right_KN, out=out_MN[block])  # with `out` they are not those that we replace
    return out_MN[:rows]


def enable(*_: object, **__: object) -> None:
    """Use these in this process for all products of two matrices on the CPU. Idempotent.

    The arguments are those of SGLang's function of this purpose, which replaces GPU kernels, and are
    ignored.
    """
    global _library  # noqa: PLW0603
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("mm", mm, "CPU")
        _library.impl("addmm", addmm, "CPU")
