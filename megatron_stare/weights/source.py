"""The tensors of a Hugging Face checkpoint on disk, read by slices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_stare.errors import UserError
from megatron_stare.weights.hf_config import HFConfig
from megatron_stare.weights.mapping import Entry

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "BF16", "F16")


class CheckpointSource:
    """Memory-mapped safetensors files of one directory, single or sharded with an index.

    Opening reads every file's header, so that a missing or truncated shard is found at once and by every
    rank alike, and not by one rank in the middle of loading while the others wait for it.

    Raises:
        UserError: no weights, a broken index, a missing, truncated or unreadable file; names the file.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        if (self.directory / INDEX).is_file():
            self._read_index()
        elif (self.directory / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            raise UserError(f"{self.directory} has no weights: neither {SINGLE} nor {INDEX} is there")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.directory / self._file_of[name]

    def slice(self, name: str) -> Any:
        """The tensor as a safetensors slice: indexing it reads from the disk, and only what is indexed."""
        return self._files[self._file_of[name]].get_slice(name)

    def _read_index(self) -> None:
        path = self.directory / INDEX
        try:
            self._file_of = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a readable index of shards: {error!r}") from error
        held: dict[str, set[str]] = {}
        for name, file in self._file_of.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise UserError(f"{path}: {name} is in {file!r}, which is not a file name")
            if file not in held:
                held[file] = set(self._open(file).keys())
            if name not in held[file]:
                raise UserError(f"{path}: {name} should be in {file}, but is not there")

    def _open(self, file: str) -> Any:
        path = self.directory / file
        if not path.is_file():
            raise UserError(f"weight file {path} is missing")
        try:
            self._files[file] = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise UserError(f"weight file {path} is damaged or incomplete: {error}") from error
        return self._files[file]


def check_source(source: CheckpointSource, entries: Iterable[Entry], config: HFConfig) -> None:
    """Compare all tensors on the disk with what the model needs, before any is read.

    Raises:
        UserError: a tensor is missing, has another shape or a quantised dtype, or is one that the family
            does not know (weights that would be dropped in silence).
    """
    wanted = {name: shape for entry in entries for name, shape in entry.hf_tensors}
    missing = [name for name in wanted if name not in source]
    if missing:
        raise UserError(f"{source.directory} lacks {_some(missing)}, which {config.architecture} needs")
    for name, shape in wanted.items():
        tensor = source.slice(name)
        found = tuple(tensor.get_shape())
        if found != shape:
            raise UserError(
                f"{name} in {source.file(name)} has shape {list(found)}; config.json asks for {list(shape)}"
            )
        if tensor.get_dtype() not in _FLOATS:
            raise UserError(
                f"{name} in {source.file(name)} is stored as {tensor.get_dtype()}; "
                f"training needs one of {', '.join(_FLOATS)}"
            )
    ignored = [re.compile(p) for p in config.family.ignored]
    if config.tied_embeddings:  # some checkpoints store the tied head a second time; transformers drops it
        ignored += [
            re.compile(re.escape(name)) for rule in config.family.after if rule.tied_to for name in rule.hf
        ]
    unknown = [name for name in source if name not in wanted and not any(p.fullmatch(name) for p in ignored)]
    if unknown:
        raise UserError(
            f"{source.directory} has tensors that {config.architecture} does not use: {_some(unknown)}"
        )


def _some(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
