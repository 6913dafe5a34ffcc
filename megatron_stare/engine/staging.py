"""A rank's share of a checkpoint, copied and written by a thread while training goes on.

Parameters and moments stand still from one optimizer update to the next. So the thread copies them while the
next batch is sampled and computed, and only the update itself may have to wait for it (`Write.settle`).
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_stare.weights import publication

# Copied before `Staging.write` returns: little to copy, and a router's bias changes before the update does.
_SMALL_BYTES = 1 << 20

# Of Megatron: path and name of a file, what goes into it as bytes, and what as tensors, each with its item.
Bucket = tuple[str, str, tuple[list, list]]


class Write:
    """A share that is being written; it answers through the queue of Megatron's request."""

    def __init__(self) -> None:
        self._copied, self._written = threading.Event(), threading.Event()

    def settle(self) -> None:
        """Wait until parameters and optimizer state may change."""
        self._copied.wait()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._written.is_set()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._written.wait()


class Staging:
    """Host memory for copies of a rank's share, kept from one save to the next."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], torch.Tensor] = {}

    def write(self, request: Any, directory: Path, rank: int, *, background: bool) -> Write:
        """Begin to carry out Megatron's `request`. One at a time.

        Without `background` nothing is copied (on a CPU), and models and optimizer must stand still until
        it is written; with it, until `Write.settle` returns.
        """
        _rank, buckets, results = request.async_fn_args
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        buckets = [self._staged(i, bucket, background, later) for i, bucket in enumerate(buckets)]
        write = Write()

        def work() -> None:
            try:
                for copy, tensor in later:
                    copy.copy_(tensor)
                later.clear()
                write._copied.set()
                threads = 1 if background else len(buckets)  # training has the other cores
                (transforms,) = request.async_fn.args[0]
                result, sums = _write_buckets(transforms, buckets, threads)
                publication.write_sums(directory, rank, sums)
            except Exception as error:
                result = error
            finally:
                write._copied.set()
            results.put(result)
            write._written.set()

        threading.Thread(target=work, name="checkpoint", daemon=True).start()
        return write

    def _staged(self, number: int, bucket: Bucket, background: bool, later: list) -> Bucket:
        """The bucket with copies in place of tensors that will change; `later` gets those to be filled."""
        path, name, (items, tensors) = bucket
        staged = []
        for i, (item, tensor) in enumerate(tensors):
            copy = tensor
            if background or not tensor.is_cpu:
                copy = self._copy_of(number, i, tensor)
                if tensor.nbytes < _SMALL_BYTES:
                    copy.copy_(tensor)
                else:
                    later.append((copy, tensor))
            staged.append((item, copy))
        return path, name, (items, staged)

    def _copy_of(self, number: int, i: int, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get((number, i))
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._copies[number, i] = torch.empty_like(tensor, device="cpu")
        return copy


class _Summing:
    """Megatron's transforms of what it writes into one file, with the sum of all that passes."""

    def __init__(self, transforms: Any) -> None:
        self._transforms, self.sum = transforms, publication.Sum()

    def transform_save_stream(self, item: Any, raw: IO[bytes]) -> tuple[Any, list]:
        """The stream that `item` goes into, and the names of what it is transformed by."""
        return self._transforms.transform_save_stream(item, _SummedStream(raw, self.sum))


class _SummedStream:
    """Writes to `raw` in pieces that a core's cache still holds when they are summed up."""

    PIECE_BYTES = 1 << 18

    def __init__(self, raw: IO[bytes], total: publication.Sum) -> None:
        self._raw, self._sum = raw, total
        self.flush = raw.flush

    def write(self, data: Any) -> int:
        """All of `data`; its bytes."""
        data = memoryview(data).cast("B")
        for begin in range(0, len(data), self.PIECE_BYTES):
            piece = data[begin : begin + self.PIECE_BYTES]
            self._raw.write(piece)
            self._sum.update(piece)
        return len(data)


def _write_buckets(
    transforms: Any, buckets: list[Bucket], threads: int
) -> tuple[dict[int, list], dict[str, dict]]:
    """Megatron's writer on each file. What it wrote, by the bucket's number, and each file's sum, by name.

    Raises what a writer met.
    """

    def write(i: int) -> tuple[list, dict]:
        results, counts = queue.SimpleQueue(), queue.Queue()
        counts.put(i)
        summing = _Summing(transforms)
        FileSystemWriterAsync.write_preloaded_data([summing], i, buckets[i], results, counts, use_fsync=True)
        _number, result = results.get()
        if isinstance(result, Exception):
            raise result
        return result, summing.sum.entry()

    with ThreadPoolExecutor(threads) as pool:
        written, sums = zip(*pool.map(write, range(len(buckets))), strict=True)
    return dict(enumerate(written)), {bucket[1]: sum_ for bucket, sum_ in zip(buckets, sums, strict=True)}
