"""What an entropy control asks of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True)
class TokenTerms:
    """Changes to the objective of each token; float32 of one shape, no gradient. None: no change."""

    weight: Tensor | None = None  # multiplies the policy term
    advantage: Tensor | None = None  # is added to A
    kl_coef: Tensor | None = None  # of a KL penalty towards the policy at the start of the step

    def items(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of those that are there."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [(name, tensor) for name, tensor in named if tensor is not None]

    def split(self, sizes: Sequence[int]) -> list[TokenTerms]:
        """Cut the terms of consecutive microbatches with `sizes` tokens apart."""
        parts = {name: tensor.split(list(sizes)) for name, tensor in self.items()}
        return [TokenTerms(**{name: part[i] for name, part in parts.items()}) for i in range(len(sizes))]
