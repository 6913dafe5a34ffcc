"""Reading by `pread`: bytes go into memory of ours, and no page of the file stays mapped.

A mapped file that is read through counts into the process's resident memory until it is unmapped, so that a
conversion would seem, and under a memory limit might be made, to need as much memory as the model has.
"""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_stare.errors import UserError
from megatron_stare.weights.dcp import Chunk, Stored
from megatron_stare.weights.stream import DTYPES


class TensorFiles:
    """Tensors of a checkpoint directory; files stay open, nothing stays in memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._descriptors: dict[str, int] = {}
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}

    def slice(self, file: str, name: str) -> SafetensorsSlice:
        """A tensor of a safetensors file, to be read by rows."""
        descriptor = self._open(file)
        if file not in self._headers:
            length = int.from_bytes(_read(descriptor, 0, 8, file).numpy().tobytes(), "little")
            text = _read(descriptor, 8, length, file).numpy().tobytes()
            self._headers[file] = 8 + length, json.loads(text)
        base, header = self._headers[file]
        entry = header[name]
        start = base + entry["data_offsets"][0]
        return SafetensorsSlice(descriptor, file, start, tuple(entry["shape"]), DTYPES[entry["dtype"]])

    def box(
        self, chunks: tuple[Chunk, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The part of a distributed checkpoint's tensor that begins at `offsets`, of shape `sizes`.

        Args:
            chunks: at least those that touch the part.

        Raises:
            UserError: the chunks do not cover the part, or one is not what the description says.
        """
        touching = [(chunk, cut) for chunk in chunks if (cut := _overlap(chunk, offsets, sizes)) is not None]
        if len(touching) == 1 and (touching[0][0].offsets, touching[0][0].sizes) == (offsets, sizes):
            return self._chunk(touching[0][0], dtype)
        out = torch.empty(sizes, dtype=dtype)
        covered = 0
        for chunk, (start, stop) in touching:
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, offsets, strict=True))
            theirs = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, chunk.offsets, strict=True))
            out[inside] = self._chunk(chunk, dtype)[theirs]
            covered += math.prod(b - a for a, b in zip(start, stop, strict=True))
        if covered != out.numel():
            raise UserError(f"{self.directory} lacks a part of a tensor: {covered} of {out.numel()} numbers")
        return out

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _chunk(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        path = self.directory / chunk.where.file
        try:
            view = io.BufferedReader(_View(self._open(chunk.where.file), chunk.where), 1 << 16)
            found = torch.load(view, map_location="cpu", weights_only=True)
        except OSError as error:
            raise UserError(f"weight file {path} cannot be read: {error}") from error
        except Exception as error:  # torch raises almost anything for a damaged archive, in many lines
            raise UserError(f"weight file {path} is damaged at byte {chunk.where.offset}") from error
        if not isinstance(found, Tensor) or found.numel() != math.prod(chunk.sizes) or found.dtype != dtype:
            raise UserError(
                f"weight file {path} is damaged at byte {chunk.where.offset}: another tensor is there"
            )
        return found.reshape(chunk.sizes)

    def _open(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self.directory / file, os.O_RDONLY)
        return self._descriptors[file]


class SafetensorsSlice:
    """Indexable as safetensors' own slices are: the rows asked for are read, then the rest is indexed."""

    def __init__(self, descriptor: int, file: str, start: int, shape: tuple[int, ...], dtype: torch.dtype):
        self._descriptor, self._file, self._start = descriptor, file, start
        self.shape, self.dtype = shape, dtype

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self.shape[0])
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        data = _read(self._descriptor, self._start + start * row, (stop - start) * row, self._file)
        tensor = data.view(self.dtype).reshape(stop - start, *self.shape[1:])
        return tensor[(slice(None), *rest)] if rest else tensor


class _View(io.RawIOBase):
    """A piece of a file as a file."""

    def __init__(self, descriptor: int, where: Stored) -> None:
        self._descriptor, self._start, self._length, self._at = descriptor, where.offset, where.length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        done = os.preadv(self._descriptor, [wanted], self._start + self._at)
        self._at += done
        return done


def _read(descriptor: int, start: int, length: int, file: str) -> Tensor:
    """`length` bytes as uint8."""
    data = torch.empty(length, dtype=torch.uint8)
    view = memoryview(data.numpy())
    while len(view):  # one call reads 2 GB at most
        done = os.preadv(descriptor, [view], start)
        if done == 0:
            raise UserError(f"weight file {file} ended early, at byte {start}")
        view, start = view[done:], start + done
    return data


def _overlap(chunk: Chunk, offsets: tuple[int, ...], sizes: tuple[int, ...]):
    start = tuple(map(max, chunk.offsets, offsets))
    ends = [
        [first + size for first, size in zip(*box, strict=True)]
        for box in ((chunk.offsets, chunk.sizes), (offsets, sizes))
    ]
    stop = tuple(map(min, *ends))
    return (start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None
