"""How Hugging Face tensors lie inside one Megatron parameter, and how tensor parallelism cuts it.

Each layout is the same two movements: `fill` writes one rank's shard from
Hugging Face tensors, touching only the rows and columns that the rank needs,
and `merge` rebuilds the Hugging Face tensors from all ranks' shards. Both only
move numbers, so a round trip is bit-exact.

Sources of `fill` are tensors, or slices of a safetensors file (`get_slice`),
which read from the disk only what is indexed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor (norms, routers)."""

    shape: Shape

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    def shard_shape(self, tp_size: int) -> Shape:
        return self.shape

    def fill(self, out: Tensor, sources: Sequence[Any], tp_rank: int, tp_size: int) -> None:
        out.copy_(sources[0][:])

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (shards[0],)


@dataclass(frozen=True)
class Column:
    """Output rows are split over ranks. Shape [rows, columns], or [rows] for a bias."""

    shape: Shape

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    def shard_shape(self, tp_size: int) -> Shape:
        return (self.shape[0] // tp_size, *self.shape[1:])

    def fill(self, out: Tensor, sources: Sequence[Any], tp_rank: int, tp_size: int) -> None:
        rows = self.shape[0] // tp_size
        out.copy_(sources[0][tp_rank * rows : (tp_rank + 1) * rows])

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_cat(shards, 0),)


@dataclass(frozen=True)
class Row:
    """Input columns are split over ranks. Shape [rows, columns]."""

    shape: Shape

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    def shard_shape(self, tp_size: int) -> Shape:
        return (self.shape[0], self.shape[1] // tp_size)

    def fill(self, out: Tensor, sources: Sequence[Any], tp_rank: int, tp_size: int) -> None:
        columns = self.shape[1] // tp_size
        out.copy_(sources[0][:, tp_rank * columns : (tp_rank + 1) * columns])

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_cat(shards, 1),)


@dataclass(frozen=True)
class Vocab:
    """Rows of a vocabulary matrix, padded with zero rows to any size that the ranks share evenly."""

    vocab_size: int
    hidden_size: int

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.vocab_size, self.hidden_size),)

    def shard_shape(self, tp_size: int) -> None:
        """The padded size is the model builder's choice; `fill` takes it from the parameter."""
        return None

    def fill(self, out: Tensor, sources: Sequence[Any], tp_rank: int, tp_size: int) -> None:
        start = min(tp_rank * out.shape[0], self.vocab_size)
        stop = min((tp_rank + 1) * out.shape[0], self.vocab_size)
        if stop > start:
            out[: stop - start].copy_(sources[0][start:stop])
        out[stop - start :].zero_()

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (_cat(shards, 0)[: self.vocab_size],)


@dataclass(frozen=True)
class QKV:
    """Query, key and value projections, fused by query group.

    A group is the query heads that share one key-value head. Rows of the fused
    matrix, group after group: [its query heads, its key head, its value head];
    ranks get whole groups. `tail` is the shape after the rows: (hidden,) for a
    weight, () for a bias.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    tail: Shape = ()

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return ((query, *self.tail), (key, *self.tail), (key, *self.tail))

    def shard_shape(self, tp_size: int) -> Shape:
        return ((self.num_heads + 2 * self.num_kv_heads) * self.head_dim // tp_size, *self.tail)

    def fill(self, out: Tensor, sources: Sequence[Any], tp_rank: int, tp_size: int) -> None:
        parts = self._grouped(out)
        groups = self.num_kv_heads // tp_size
        for part, source in zip(parts, sources, strict=True):
            rows = part.shape[1] * groups
            part.copy_(source[tp_rank * rows : (tp_rank + 1) * rows].reshape(part.shape))

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        by_rank = [self._grouped(shard) for shard in shards]
        return tuple(torch.cat([parts[i].reshape(-1, *self.tail) for parts in by_rank]) for i in range(3))

    def _grouped(self, fused: Tensor) -> tuple[Tensor, ...]:
        """Views of the query, key and value rows: [groups of this rank, rows a group, *tail]."""
        query = self.num_heads // self.num_kv_heads * self.head_dim
        sizes = (query, self.head_dim, self.head_dim)
        return fused.view(-1, sum(sizes), *self.tail).split(sizes, dim=1)


@dataclass(frozen=True)
class GateUp:
    """Gate and up projections of a gated MLP. A rank's rows: [its gate rows, its up rows]."""

    ffn_size: int
    tail: Shape = ()

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return ((self.ffn_size, *self.tail),) * 2

    def shard_shape(self, tp_size: int) -> Shape:
        return (2 * self.ffn_size // tp_size, *self.tail)

    def fill(self, out: Tensor, sources: Sequence[Any], tp_rank: int, tp_size: int) -> None:
        rows = self.ffn_size // tp_size
        for part, source in zip(out.chunk(2), sources, strict=True):
            part.copy_(source[tp_rank * rows : (tp_rank + 1) * rows])

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        halves = [shard.chunk(2) for shard in shards]
        return tuple(_cat([half[i] for half in halves], 0) for i in range(2))


Layout = Replicated | Column | Row | Vocab | QKV | GateUp


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
