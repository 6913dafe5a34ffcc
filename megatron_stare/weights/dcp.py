"""Megatron's distributed checkpoints ("torch_dist"), read and written without Megatron and without ranks.

Such a directory is one of PyTorch's distributed checkpoints: `.metadata`, a pickle that says which tensors
there are and in which piece of which `*.distcp` file every chunk of them lies, each piece a `torch.save` of
its own. Megatron adds `metadata.json` (the format's name) and `common.pt` (what is not sharded; here empty).

In Megatron's global form a parameter is one tensor of all layers and experts, [*grid, *shape], whose shape
is that of one process without tensor parallelism.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_stare.errors import UserError
from megatron_stare.weights.mapping import Entry
from megatron_stare.weights.pwrite import write_at

FORMAT_FILE = "metadata.json"
DESCRIPTION = ".metadata"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Stored:
    """A piece of a file: one `torch.save`."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """The part of a tensor that begins at `offsets`, and where it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    where: Stored


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Description:
    """What a checkpoint holds: tensors and pickled objects by key."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, Stored]


def is_megatron(directory: Path) -> bool:
    """Whether a directory is a Megatron distributed checkpoint, by the files in it."""
    return (directory / FORMAT_FILE).is_file() and "sharded_backend" in _json_object(directory / FORMAT_FILE)


class Appender:
    """A new file of a checkpoint, to which values are saved one after the other.

    Raises:
        FileExistsError: there is one of this name.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self._descriptor = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        self._end = 0

    def append(self, value: Any) -> Stored:
        """Save a value; where it is."""
        start = self._end
        torch.save(value, self)
        return Stored(self.name, start, self._end - start)

    def write(self, data: Any) -> int:
        """For torch.save."""
        self._end = write_at(self._descriptor, data, self._end)
        return len(data)

    def flush(self) -> None:
        """For torch.save; nothing is held back."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def write_description(directory: Path, tensors: Mapping[str, StoredTensor], objects: Mapping[str, Stored]):
    """Write all of a checkpoint but its `*.distcp` files."""
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries: dict[str, Any] = {key: m.BytesStorageMetadata() for key in objects}
    storage = {m.MetadataIndex(key): _info(_StorageInfo, where) for key, where in objects.items()}
    for key, tensor in tensors.items():
        chunks = sorted(tensor.chunks, key=lambda chunk: chunk.offsets)
        entries[key] = m.TensorStorageMetadata(
            properties=m.TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
            chunks=[m.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in chunks],
        )
        for chunk in chunks:
            storage[m.MetadataIndex(key, chunk.offsets)] = _info(_StorageInfo, chunk.where)
    described = m.Metadata(entries, planner_data=None, storage_data=storage, storage_meta=m.StorageMeta())
    (directory / DESCRIPTION).write_bytes(pickle.dumps(described))
    torch.save({}, directory / "common.pt")
    (directory / FORMAT_FILE).write_text(json.dumps(_FORMAT), encoding="utf-8")


def prepare_writing() -> None:
    """Import what `write_description` needs: half a second that can pass while workers work."""
    import torch.distributed.checkpoint.filesystem  # noqa: F401


def extra_state_keys(entries: Iterable[Entry]) -> list[str]:
    """Keys under which Megatron's layers ask for the state of FP8, which may be empty but not absent.

    Local linears have the name for compatibility; with Transformer Engine attention and norms have one too.
    """
    keys = {}
    for entry in entries:
        module = entry.key.rpartition(".")[0]
        parent, _, last = module.rpartition(".")
        place, grid = entry.place or (0,), entry.grid or (1,)
        shard = f"shard_{'.'.join(map(str, place))}_{'.'.join(map(str, grid))}"
        if last.startswith("linear_") or last.endswith("layernorm"):
            keys[f"{module}._extra_state/{shard}"] = None
        if last == "linear_qkv":
            keys[f"{parent}.core_attention._extra_state/{shard}"] = None
    return list(keys)


def read_description(directory: Path) -> Description:
    """Read `.metadata`, and compare the files' sizes with it.

    Raises:
        UserError: another format, an unreadable description, a missing or truncated file; names the file.
    """
    backend = _json_object(directory / FORMAT_FILE).get("sharded_backend")
    if backend != "torch_dist":
        file = directory / FORMAT_FILE
        raise UserError(f"{file}: format {backend!r} is not supported; only 'torch_dist' is")
    path = directory / DESCRIPTION
    if not path.is_file():
        raise UserError(f"{directory} is an incomplete Megatron checkpoint: it has no {DESCRIPTION}")
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
        description = _described(found)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise UserError(f"{path} is damaged or not a description of a checkpoint: {error}") from error
    _check_files(directory, description)
    return description


def _described(found: Any) -> Description:
    tensors, objects = {}, {}
    stored = {}
    for index, info in found.storage_data.items():
        if transforms := getattr(info, "transform_descriptors", None):
            raise ValueError(f"{index.fqn} is stored with {transforms}, which is not supported")
        offset = getattr(index, "offset", None)
        stored[index.fqn, offset and tuple(offset)] = Stored(info.relative_path, info.offset, info.length)
    for key, value in found.state_dict_metadata.items():
        if not hasattr(value, "chunks"):
            objects[key] = stored[key, None]
            continue
        chunks = tuple(
            Chunk(tuple(c.offsets), tuple(c.sizes), stored[key, tuple(c.offsets)]) for c in value.chunks
        )
        tensors[key] = StoredTensor(tuple(value.size), value.properties.state[0], chunks)
    return Description(tensors, objects)


def _check_files(directory: Path, description: Description) -> None:
    ends: dict[str, int] = {}
    pieces = [chunk.where for tensor in description.tensors.values() for chunk in tensor.chunks]
    for piece in [*pieces, *description.objects.values()]:
        ends[piece.file] = max(ends.get(piece.file, 0), piece.offset + piece.length)
    for name, end in ends.items():
        path = directory / name
        if Path(name).name != name:
            raise UserError(f"{directory / DESCRIPTION} names {name!r}, which is not a file name")
        if not path.is_file():
            raise UserError(f"weight file {path} is missing")
        size = path.stat().st_size
        if size < end:
            raise UserError(f"weight file {path} is truncated: {size} bytes instead of at least {end}")


class _Stub:
    """Holds what an object of one of PyTorch's or Megatron's description classes holds."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        # TensorProperties gives its fields as a tuple, dtype first; all others give a dict.
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Unpickler(pickle.Unpickler):
    """Builds stubs in place of a description's classes and knows no other: a file cannot run any code.

    That also spares importing PyTorch's module, which takes as long as reading a small model.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")):
            return _Stub
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _Stub
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) in (("builtins", "set"), ("collections", "OrderedDict")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which has no place in a description")


def _info(kind: type, where: Stored) -> Any:
    return kind(where.file, where.offset, where.length)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    return value if isinstance(value, dict) else {}
