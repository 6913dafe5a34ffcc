"""The functions of `logprob_plain` as Triton kernels: one pass over a block of logits each.

Plain torch reads and writes a block about six times a pass; here it is read once, and overwritten once
by its gradient, in its own dtype. Checked against plain torch in Triton's interpreter; not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024  # that a program handles at once


def accumulate(
    logits_NB: torch.Tensor, targets_N: torch.Tensor, scale: float, running_4N: torch.Tensor
) -> None:
    """See `logprob_plain.accumulate`."""
    rows, columns = logits_NB.shape
    if rows and columns:
        _accumulate[(rows,)](logits_NB, targets_N, running_4N, rows, columns, scale, BLOCK=_COLUMNS)


def gradient(
    logits_NB: torch.Tensor, targets_N: torch.Tensor, scale: float, rows_4N: torch.Tensor
) -> torch.Tensor:
    """See `logprob_plain.gradient`; the gradient overwrites the logits."""
    rows, columns = logits_NB.shape
    if rows and columns:
        grid = (rows, triton.cdiv(columns, _COLUMNS))
        _gradient[grid](logits_NB, targets_N, rows_4N, rows, columns, scale, BLOCK=_COLUMNS)
    return logits_NB


@triton.jit
def _accumulate(logits_ptr, targets_ptr, running_ptr, rows, columns, scale, BLOCK: tl.constexpr):
    """One program a row, over all columns."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    running_ptr += row
    largest = tl.load(running_ptr)
    total = tl.load(running_ptr + rows)
    weighted = tl.load(running_ptr + 2 * rows)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        real = column < columns
        logit = tl.load(logits_ptr + column, mask=real, other=float("-inf")).to(tl.float32) * scale
        before = largest
        largest = tl.maximum(before, tl.max(logit, axis=0))
        shift = before - largest
        factor = tl.exp(shift)
        shifted = tl.where(real, logit - largest, 0.0)
        weight = tl.where(real, tl.exp(shifted), 0.0)
        weighted = factor * (weighted + shift * total) + tl.sum(weight * shifted, axis=0)
        total = factor * total + tl.sum(weight, axis=0)
    tl.store(running_ptr, largest)
    tl.store(running_ptr + rows, total)
    tl.store(running_ptr + 2 * rows, weighted)
    target = tl.load(targets_ptr + row)
    inside = (target >= 0) & (target < columns)
    picked = tl.load(logits_ptr + target, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(running_ptr + 3 * rows, tl.load(running_ptr + 3 * rows) + picked)


@triton.jit
def _gradient(logits_ptr, targets_ptr, rows_ptr, rows, columns, scale, BLOCK: tl.constexpr):
    """One program a row and group of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < columns
    logits_ptr += row * columns
    rows_ptr += row
    log_partition = tl.load(rows_ptr)
    constant = tl.load(rows_ptr + rows)
    slope = tl.load(rows_ptr + 2 * rows)
    at_target = tl.load(rows_ptr + 3 * rows)
    logit = tl.load(logits_ptr + column, mask=real, other=0.0).to(tl.float32) * scale
    log_p = logit - log_partition
    grad = tl.exp(log_p) * (constant + slope * log_p)
    grad += tl.where(column == tl.load(targets_ptr + row), at_target, 0.0)
    tl.store(logits_ptr + column, grad.to(logits_ptr.dtype.element_ty), mask=real)
