"""A Megatron distributed checkpoint into a Hugging Face directory, piece by piece, without a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron_stare.errors import UserError
from megatron_stare.weights.dcp import Chunk, StoredTensor, read_description
from megatron_stare.weights.hf_config import HFConfig
from megatron_stare.weights.mapping import Entry, model_entries
from megatron_stare.weights.pieces import Piece, global_shape, nbytes, pieces
from megatron_stare.weights.pool import share_out
from megatron_stare.weights.pread import TensorFiles
from megatron_stare.weights.pwrite import write_at
from megatron_stare.weights.save import FilePlan, plan_files, write_index
from megatron_stare.weights.stream import SafetensorsStream, TensorSpec

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Item:
    """A piece, the stored chunks that it touches, and where its Hugging Face tensors go."""

    piece: Piece
    chunks: tuple[Chunk, ...]
    stored_dtype: torch.dtype
    dtype: torch.dtype
    file: str
    starts: tuple[int, ...]


@dataclass
class ToHF:
    """The plan of a conversion: nothing is written before `run`.

    Args:
        source: the Megatron checkpoint; an optimizer's state in it is not read.
        config: what `read_hf_config` says about the model.
        dtype: of all tensors; None: as stored.
        max_shard_bytes: largest weight file.

    Raises:
        UserError: the checkpoint is incomplete, or does not hold the tensors that `config` asks for.
    """

    source: Path
    config: HFConfig
    dtype: torch.dtype | None = None
    max_shard_bytes: int = 4 * 10**9
    entries: list[Entry] = field(init=False)
    dtypes: dict[str, torch.dtype] = field(init=False)

    def __post_init__(self) -> None:
        stored = read_description(self.source).tensors
        self.entries = [entry for entry in model_entries(self.config) if not entry.copy]
        check_tensors(stored, self.entries, self.config, self.source)
        self.dtypes = {entry.key: self.dtype or stored[entry.key].dtype for entry in self.entries}
        self._files = plan_files([(e, self._specs(e), [0]) for e in self.entries], self.max_shard_bytes)
        self.items = self._items(stored)
        self.sizes = [nbytes(item.piece, item.stored_dtype.itemsize) for item in self.items]

    def files(self, workers: int) -> list[tuple[str, int]]:
        """Names and sizes of the weight files."""
        return [(file.name, sum(spec.nbytes for spec in file.specs)) for file in self._files]

    def run(self, stage: Path, workers: int, advance: Callable[[int], None]) -> None:
        """Write the weight files and their index into `stage`."""
        bases = {file.name: _make_file(stage / file.name, file.specs) for file in self._files}
        share_out(_Job(self.source, stage, bases), self.items, self.sizes, workers=workers, advance=advance)
        write_index(stage, [(file.name, file.specs) for file in self._files])

    def _specs(self, entry: Entry) -> list[TensorSpec]:
        dtype = self.dtypes[entry.key]
        return [TensorSpec(name, shape, dtype) for name, shape in entry.hf_tensors]

    def _items(self, stored: dict[str, StoredTensor]) -> list[_Item]:
        finders = {e.key: _ChunkFinder(stored[e.key], len(e.grid)) for e in self.entries}
        return [
            _Item(
                piece=piece,
                chunks=finders[entry.key].touching(piece),
                stored_dtype=stored[entry.key].dtype,
                dtype=self.dtypes[entry.key],
                file=file.name,
                starts=tuple(starts[name] + self._first_byte(piece) for name in entry.hf),
            )
            for file in self._files
            for starts in [_starts(file)]
            for entry in file.entries
            for piece in pieces(entry, stored[entry.key].shape[0], stored[entry.key].dtype.itemsize)
        ]

    def _first_byte(self, piece: Piece) -> int:
        """Where a vocabulary's part begins in its tensor."""
        return piece.first_row * piece.sizes[-1] * self.dtypes[piece.key].itemsize if piece.parts > 1 else 0


@dataclass
class _Job:
    """A worker's part: every tensor has its place in a file, so all workers write into all files."""

    source: Path
    stage: Path
    bases: dict[str, int]

    def open(self) -> None:
        self._reader = TensorFiles(self.source)
        self._targets = {name: os.open(self.stage / name, os.O_WRONLY) for name in self.bases}

    def do(self, item: _Item) -> None:
        piece = item.piece
        stored = self._reader.box(item.chunks, piece.offsets, piece.sizes, item.stored_dtype)
        for tensor, start in zip(_hf_tensors(piece, stored), item.starts, strict=True):
            self._write(item.file, start, tensor.to(item.dtype))

    def _write(self, file: str, start: int, tensor: Tensor) -> None:
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        write_at(self._targets[file], data, self.bases[file] + start)


def check_tensors(
    stored: dict[str, StoredTensor], entries: list[Entry], config: HFConfig, directory: Path
) -> None:
    """Compare a checkpoint's tensors with what the model needs.

    Raises:
        UserError: a tensor is missing, has another shape or no float dtype, or is a weight that the family
            does not know (it would be dropped in silence).
    """
    wanted = {entry.key: entry for entry in entries}
    for key, entry in wanted.items():
        if key not in stored:
            raise UserError(f"{directory} lacks {key}, which {config.architecture} needs")
        found = stored[key]
        rows = max(config.vocab_size, *found.shape[:1])
        if found.shape != global_shape(entry, rows):
            expected = global_shape(entry, config.vocab_size)
            raise UserError(
                f"{key} in {directory} has shape {list(found.shape)}; config.json asks for {list(expected)}"
            )
        if found.dtype not in _FLOATS:
            raise UserError(f"{key} in {directory} is stored as {found.dtype}, which is not supported")
    # Optimizers, random states and the like have other first names.
    roots = {key.partition(".")[0] for key in wanted} | {"output_layer"}
    unknown = sorted(key for key in stored if key not in wanted and key.partition(".")[0] in roots)
    if unknown:
        raise UserError(f"{directory} has tensors that {config.architecture} does not use: {unknown[0]}")


class _ChunkFinder:
    """Finds the chunks that a piece touches without looking at those of every layer."""

    def __init__(self, tensor: StoredTensor, depth: int) -> None:
        self._depth = depth
        self._of_one_place: dict[tuple[int, ...], list[Chunk]] = {}
        self._of_several: list[Chunk] = []
        for chunk in tensor.chunks:
            if all(size == 1 for size in chunk.sizes[:depth]):
                self._of_one_place.setdefault(chunk.offsets[:depth], []).append(chunk)
            else:
                self._of_several.append(chunk)

    def touching(self, piece: Piece) -> tuple[Chunk, ...]:
        found = self._of_several + self._of_one_place.get(piece.offsets[: self._depth], [])
        return tuple(
            chunk
            for chunk in found
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(chunk.offsets, chunk.sizes, piece.offsets, piece.sizes, strict=True)
            )
        )


def _hf_tensors(piece: Piece, stored: Tensor) -> tuple[Tensor, ...]:
    if piece.parts > 1:  # rows of a vocabulary, those of the padding left out
        return (stored[: max(0, piece.layout.vocab_size - piece.first_row)],)
    return piece.layout.merge([stored.view(piece.shape)])


def _starts(file: FilePlan) -> dict[str, int]:
    starts, position = {}, 0
    for spec in file.specs:
        starts[spec.name] = position
        position += spec.nbytes
    return starts


def _make_file(path: Path, specs: list[TensorSpec]) -> int:
    """A file with its header and room for the data; where the data begins."""
    SafetensorsStream(path, specs).close()
    base = path.stat().st_size
    os.truncate(path, base + sum(spec.nbytes for spec in specs))
    return base
