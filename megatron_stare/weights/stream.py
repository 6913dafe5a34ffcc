"""A safetensors file written tensor by tensor.

The safetensors library writes a file from tensors that are all in memory. An export knows every name, dtype
and shape beforehand, so the header can be written first and each tensor appended as it arrives: one tensor
is held, whatever the size of the file. Format: https://huggingface.co/docs/safetensors (8 bytes little
endian: length of the header; a JSON header; the data, without gaps).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_stare.weights.pwrite import write_at

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""What safetensors calls torch's dtypes."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it exists."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsStream:
    """Context manager that writes one file; `add` takes the tensors in the order of `specs`.

    Args:
        path: file to make; an existing one is replaced.
        specs: all tensors of the file, in order.

    Raises:
        ValueError: a tensor is not the next one of `specs`, or not all came before the end.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, specs: Sequence[TensorSpec]) -> None:
        self.path = Path(path)
        self._specs = list(specs)
        self._next = 0
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._end = self._file.write(_header(self._specs))

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor; it is moved to the CPU if need be, never cast."""
        spec = self._specs[self._next] if self._next < len(self._specs) else None
        given = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        if given != spec:
            raise ValueError(f"{self.path.name}: {given} came where {spec} belongs")
        self._next += 1
        data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        self._end = write_at(self._file.fileno(), data, self._end)

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def __enter__(self) -> SafetensorsStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None and self._next != len(self._specs):
            raise ValueError(f"{self.path.name}: {self._specs[self._next]} never came")


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        if spec.name in entries:
            raise ValueError(f"tensor {spec.name} was given twice")
        if spec.dtype not in _NAMES:
            raise ValueError(f"{spec.name}: safetensors has no {spec.dtype}")
        entries[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.nbytes],
        }
        start += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8, as the library does it
    return len(text).to_bytes(8, "little") + text
