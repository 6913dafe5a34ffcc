"""What is converted at one time: a parameter of one layer, or some rows of a vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_stare.weights.layouts import Layout, Vocab
from megatron_stare.weights.mapping import Entry

PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor: part `part` of the `parts` that make up one parameter.

    Attributes:
        offsets, sizes: of the box, in the axes of the global tensor (layer, expert, rows, columns).
    """

    key: str
    hf: tuple[str, ...]
    layout: Layout
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: int = 0
    parts: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter's part, without layers and experts."""
        return self.layout.shard_shape(1) or self.sizes

    @property
    def first_row(self) -> int:
        """Of a vocabulary's part."""
        return self.offsets[0]


def pieces(entry: Entry, rows: int, itemsize: int) -> list[Piece]:
    """Cut an entry into pieces.

    A vocabulary may be larger than everything else in a layer together; its rows are cut evenly into as
    many parts as make a part small, as over so many tensor-parallel ranks.

    Args:
        rows: of a vocabulary, with padding.
        itemsize: bytes a number.
    """
    if not isinstance(entry.layout, Vocab):
        shape = entry.layout.shard_shape(1)
        ones = (1,) * len(entry.place)
        return [Piece(entry.key, entry.hf, entry.layout, (*entry.place, *(0,) * len(shape)), (*ones, *shape))]
    width = entry.layout.hidden_size
    parts = 1
    while rows // parts * width * itemsize > PIECE_BYTES and rows % (2 * parts) == 0:
        parts *= 2
    size = rows // parts
    return [
        Piece(entry.key, entry.hf, entry.layout, (i * size, 0), (size, width), i, parts) for i in range(parts)
    ]


def global_shape(entry: Entry, rows: int) -> tuple[int, ...]:
    """Shape of the tensor that holds an entry of all layers and experts; `rows`: padded vocabulary."""
    if isinstance(entry.layout, Vocab):
        return rows, entry.layout.hidden_size
    return (*entry.grid, *entry.layout.shard_shape(1))


def nbytes(piece: Piece, itemsize: int) -> int:
    """Bytes of a piece."""
    return math.prod(piece.sizes) * itemsize
