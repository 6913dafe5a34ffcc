"""What every loss does with its inputs first."""

from __future__ import annotations

import torch
from torch import Tensor


def masked(tensor: Tensor, inside: Tensor) -> Tensor:
    """At least float32, 0 outside the mask; the gradient outside is exactly 0 too."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return torch.where(inside, wide, 0)


def check_shapes(log_probs: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError for a tensor that is not shaped like `log_probs`, by its name."""
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != log_probs.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, log_probs {tuple(log_probs.shape)}")
