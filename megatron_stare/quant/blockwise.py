"""Block-wise FP8 of weights: float8_e4m3fn with one float32 scale per 128 x 128 block.

The layout of the published FP8 checkpoints (DeepSeek-V3, Qwen3-*-FP8): beside `NAME` lies `NAME_scale_inv`,
by which the stored values are multiplied to get the weight back. Blocks at the right and lower edges hold
what is left of the matrix.

Pure torch, on whatever device the tensors are: export and weight sync use the same two functions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
"""448: the largest finite value of float8_e4m3fn."""

_CHUNK_ELEMENTS = 1 << 24
"""Elements that are in float32 at a time: 64 MiB, twice or three times over."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the scales of a [rows, columns] weight: blocks down, blocks across."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def quantize_blockwise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to FP8, each 128 x 128 block with the scale that its largest value needs.

    Computed in float32: scale = largest magnitude of the block / 448 (1 for a block of zeros), values =
    weight / scale, rounded to the nearest, ties to even.

    Args:
        weight: [rows, columns], any floating dtype.

    Returns:
        float8_e4m3fn [rows, columns], and float32 scales [ceil(rows / 128), ceil(columns / 128)].

    Raises:
        ValueError: not two-dimensional, or a value is NaN or infinite.
    """
    if weight.dim() != 2:
        raise ValueError(f"a matrix is needed, not shape {list(weight.shape)}")
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(scale_shape(weight.shape), dtype=torch.float32, device=weight.device)
    for rows, blocks in _chunks(weight.shape):
        part = _padded(weight[rows].float())
        largest = part.abs().amax(dim=(1, 3))
        scale = largest / FP8_MAX
        # Zero also where the largest magnitude is so small that the quotient underflows.
        scale = torch.where(scale == 0, 1.0, scale)
        # Not in place: `part` may be the caller's weight.
        part = part.div(scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
        values[rows] = _unpadded(part, values[rows].shape).to(FP8)
        scales[blocks] = scale
    if not bool(torch.isfinite(scales).all()):  # one look at the end: on a GPU each one waits for the device
        raise ValueError("a value is NaN or infinite")
    return values, scales


def dequantize_blockwise(values: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that `quantize_blockwise` stored: values times the scale of their block.

    Args:
        values: float8_e4m3fn [rows, columns].
        scale_inv: scales [ceil(rows / 128), ceil(columns / 128)], float32 or bfloat16.
        dtype: of the result; multiplied in float32 and rounded once.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if values.dim() != 2 or tuple(scale_inv.shape) != scale_shape(values.shape):
        raise ValueError(
            f"scales {list(scale_inv.shape)} do not fit values {list(values.shape)} in blocks of {BLOCK}"
        )
    weight = torch.empty(values.shape, dtype=dtype, device=values.device)
    for rows, blocks in _chunks(values.shape):
        part = _padded(values[rows].float()).mul_(scale_inv[blocks].float()[:, None, :, None])
        weight[rows] = _unpadded(part, weight[rows].shape).to(dtype)
    return weight


def _chunks(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Rows of the matrix, and rows of blocks, that are worked on at a time."""
    step = max(1, _CHUNK_ELEMENTS // max(1, BLOCK * shape[1]))
    for block in range(0, scale_shape(shape)[0], step):
        yield slice(block * BLOCK, (block + step) * BLOCK), slice(block, block + step)


def _padded(part: Tensor) -> Tensor:
    """[rows, columns] -> [blocks down, 128, blocks across, 128], filled with zeros. May share memory."""
    rows, columns = part.shape
    part = torch.nn.functional.pad(part, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return part.reshape(part.shape[0] // BLOCK, BLOCK, part.shape[1] // BLOCK, BLOCK)


def _unpadded(part: Tensor, shape: torch.Size) -> Tensor:
    down, across = part.shape[0] * BLOCK, part.shape[2] * BLOCK
    return part.reshape(down, across)[: shape[0], : shape[1]]
