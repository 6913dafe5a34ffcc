"""Named tensors into an ordinary Hugging Face directory: sharded safetensors, index, config, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_stare.errors import UserError
from megatron_stare.weights.files import refuse_existing, staged_directory
from megatron_stare.weights.source import INDEX, SINGLE

# What a checkpoint directory holds beside config.json and the weights, in all spellings that are in use.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def save_hf(
    directory: str | Path,
    named_tensors: Iterable[tuple[str, Tensor | None]],
    source_dir: str | Path,
    *,
    max_shard_bytes: int = 4 * 10**9,
) -> bool:
    """Write a checkpoint that transformers and SGLang load, complete or not at all.

    Fits `iter_hf_weights`: call it on all ranks; the one that gets the tensors writes, the others only
    take part. At most one shard of `max_shard_bytes` is held in memory.

    Args:
        directory: made by this function; must not exist.
        named_tensors: (name, tensor); None for the tensors on ranks that do not write. All of one dtype,
            which config.json will name.
        source_dir: checkpoint whose config.json, generation config and tokenizer are copied.
        max_shard_bytes: largest weight file; a single tensor may exceed it.

    Returns:
        Whether this rank wrote.

    Raises:
        UserError: `directory` exists, `source_dir` has no config.json, or writing failed (disk full).
    """
    tensors = iter(named_tensors)
    first = next(tensors, None)
    if first is None or first[1] is None:
        for _ in tensors:
            pass
        return False
    refuse_existing(directory)
    if not (Path(source_dir) / "config.json").is_file():
        raise UserError(f"{source_dir} has no config.json to go with the weights")
    try:
        with staged_directory(directory) as stage:
            writer = _ShardWriter(stage, max_shard_bytes)
            writer.add(*first)
            for name, tensor in tensors:
                writer.add(name, tensor)
            writer.finish()
            _copy_companions(Path(source_dir), stage, first[1].dtype)
    except OSError as error:
        raise UserError(f"cannot write {directory}: {error}") from error
    return True


class _ShardWriter:
    """Collects tensors into files of bounded size; names the files when their number is known."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = 0
        self.total_bytes = 0
        self.shard_of: dict[str, int] = {}
        self.shards = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if name in self.shard_of or name in self.pending:
            raise ValueError(f"tensor {name} was given twice")
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > self.max_bytes:
            self._flush()
        self.pending[name] = tensor.detach().to("cpu").contiguous()
        self.pending_bytes += size
        self.total_bytes += size

    def finish(self) -> None:
        self._flush()
        if self.shards == 1:
            self._part(1).rename(self.directory / SINGLE)
            return
        names = {n: f"model-{n:05d}-of-{self.shards:05d}.safetensors" for n in range(1, self.shards + 1)}
        for number, name in names.items():
            self._part(number).rename(self.directory / name)
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": {name: names[number] for name, number in self.shard_of.items()},
        }
        (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        self.shards += 1
        save_file(self.pending, self._part(self.shards), metadata={"format": "pt"})
        self.shard_of.update(dict.fromkeys(self.pending, self.shards))
        self.pending, self.pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.directory / f"part-{number:05d}"


def _copy_companions(source: Path, target: Path, dtype: torch.dtype) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # transformers 4 and 5 spell it so
    config[key] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
