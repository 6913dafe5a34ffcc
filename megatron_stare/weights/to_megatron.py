"""A Hugging Face directory into a Megatron distributed checkpoint, piece by piece, without a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_stare.weights.dcp import (
    Appender,
    Chunk,
    Stored,
    StoredTensor,
    extra_state_keys,
    prepare_writing,
    write_description,
)
from megatron_stare.weights.hf_config import HFConfig
from megatron_stare.weights.mapping import Entry, model_entries
from megatron_stare.weights.pieces import Piece, global_shape, nbytes, pieces
from megatron_stare.weights.pool import share_out
from megatron_stare.weights.pread import TensorFiles
from megatron_stare.weights.source import CheckpointSource, check_source
from megatron_stare.weights.stream import DTYPES


@dataclass
class ToMegatron:
    """The plan of a conversion: nothing is written before `run`.

    Args:
        source: the Hugging Face directory.
        config: what `read_hf_config` says about it.
        dtype: of all tensors; None: as stored, or the widest where a parameter of several layers is stored
            in several.
        vocab_multiple: rows of the vocabulary are padded to a multiple of it. Megatron also loads a
            checkpoint that was padded otherwise.

    Raises:
        UserError: a file, tensor, shape or dtype of the source is not what its config.json asks for.
    """

    source: Path
    config: HFConfig
    dtype: torch.dtype | None = None
    vocab_multiple: int = 128
    entries: list[Entry] = field(init=False)
    dtypes: dict[str, torch.dtype] = field(init=False)
    items: list[tuple[Piece, torch.dtype]] = field(init=False)

    def __post_init__(self) -> None:
        entries = model_entries(self.config)
        reader = CheckpointSource(self.source)
        check_source(reader, entries, self.config)
        self.entries = [entry for entry in entries if not entry.copy]
        self.rows = -(-self.config.vocab_size // self.vocab_multiple) * self.vocab_multiple
        self.dtypes = self._dtypes(reader)
        self.file_of = {name: reader.file(name).name for entry in self.entries for name in entry.hf}
        self.items = [
            (piece, self.dtypes[piece.key])
            for entry in self.entries
            for piece in pieces(entry, self.rows, self.dtypes[entry.key].itemsize)
        ]
        self.sizes = [nbytes(piece, dtype.itemsize) for piece, dtype in self.items]

    def files(self, workers: int) -> list[tuple[str, int]]:
        """Names and approximate sizes of the weight files."""
        return [(f"__{i}_0.distcp", sum(self.sizes) // workers) for i in range(workers)]

    def run(self, stage: Path, workers: int, advance: Callable[[int], None]) -> None:
        """Write the checkpoint's files into `stage`."""
        job = _Job(self.source, stage, self.file_of)
        stored = share_out(
            job, self.items, self.sizes, workers=workers, advance=advance, meanwhile=prepare_writing
        )
        chunks: dict[str, list[Chunk]] = {}
        for (piece, _), where in zip(self.items, stored, strict=True):
            chunks.setdefault(piece.key, []).append(Chunk(piece.offsets, piece.sizes, where))
        shapes = {entry.key: global_shape(entry, self.rows) for entry in self.entries}
        tensors = {
            key: StoredTensor(shapes[key], self.dtypes[key], tuple(found)) for key, found in chunks.items()
        }
        extra = Appender(stage, "__extra_0.distcp")
        nothing = extra.append([None])
        extra.close()
        write_description(stage, tensors, dict.fromkeys(extra_state_keys(self.entries), nothing))

    def _dtypes(self, reader: CheckpointSource) -> dict[str, torch.dtype]:
        found: dict[str, torch.dtype] = {}
        for entry in self.entries:
            for name in entry.hf:
                stored = self.dtype or DTYPES[reader.slice(name).get_dtype()]
                found[entry.key] = torch.promote_types(found.get(entry.key, stored), stored)
        return found


@dataclass
class _Job:
    """A worker's part: it appends to a file of its own."""

    source: Path
    stage: Path
    file_of: dict[str, str]

    def open(self) -> None:
        # A checksum over every number takes longer than writing it, and torch.load does not look at it.
        torch.serialization.set_crc32_options(False)
        self._reader = TensorFiles(self.source)
        self._file: Appender | None = None  # a worker that gets no item leaves no empty file

    def do(self, item: tuple[Piece, torch.dtype]) -> Stored:
        piece, dtype = item
        slices = [self._reader.slice(self.file_of[name], name) for name in piece.hf]
        parameter = torch.empty(piece.shape, dtype=dtype)
        piece.layout.fill(parameter, slices, piece.part, piece.parts)
        if self._file is None:
            self._file = _own_file(self.stage)
        return self._file.append(parameter.view(piece.sizes))


def _own_file(stage: Path) -> Appender:
    """The file `__N_0.distcp` with the first free N: workers have no numbers."""
    for number in itertools.count():
        try:
            return Appender(stage, f"__{number}_0.distcp")
        except FileExistsError:
            continue
