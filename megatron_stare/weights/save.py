"""An ordinary Hugging Face directory, written by all ranks together: safetensors, index, config, tokenizer.

Which tensor goes to which file, and which rank writes the file, is planned beforehand from names and shapes
alone, equally on all ranks. Each writer appends the tensors of its file as they arrive (`stream.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_stare.errors import UserError
from megatron_stare.weights.export import Exporter
from megatron_stare.weights.files import StagedDirectory, refuse_existing
from megatron_stare.weights.mapping import Entry
from megatron_stare.weights.source import INDEX, SINGLE
from megatron_stare.weights.stream import SafetensorsStream, TensorSpec

MAX_SHARD_BYTES = 4 * 10**9

# What a checkpoint directory holds beside config.json and the weights, in all spellings that are in use.
COMPANIONS = (
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
    exporter: Exporter,
    source_dir: str | Path,
    *,
    card: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint that transformers and SGLang load, complete or not at all; collective.

    Args:
        directory: made by this function, on a file system that all ranks share; must not exist.
        exporter: of the model; its dtype is what is written.
        source_dir: checkpoint whose config.json, generation config and tokenizer are copied.
        card: text of README.md, the model card.
        max_shard_bytes: largest weight file; a single parameter's tensors may exceed it.

    Raises:
        UserError: on every rank; `directory` exists, `source_dir` has no config.json, or writing failed.
    """
    parts = [(entry, exporter.specs(entry), exporter.holders(entry)) for entry in exporter.entries]
    plan = plan_files(parts, max_shard_bytes)
    staged = StagedDirectory(directory)
    error = None
    if exporter.rank == 0:
        error = _attempt(lambda: (_check(directory, source_dir), staged.create()))
    _agree(error)
    staged.join(_from_rank_0(staged.name))
    error = _write(exporter, plan, staged.path)
    if exporter.rank == 0 and error is None:
        error = _attempt(lambda: _write_companions(staged.path, Path(source_dir), plan, exporter.dtype, card))
    try:
        _agree(error)
    except UserError:
        if exporter.rank == 0:
            staged.discard()
        raise
    if exporter.rank == 0:
        error = _attempt(staged.publish)
    _agree(error)


@dataclass(frozen=True)
class FilePlan:
    """One weight file: its name, the entries in it, and the rank that writes it."""

    name: str
    entries: list[Entry]
    specs: list[TensorSpec]
    writer: int


def plan_files(
    entries: Sequence[tuple[Entry, list[TensorSpec], list[int]]], max_bytes: int
) -> list[FilePlan]:
    """Cut entries, in order, into files of at most `max_bytes`, and choose who writes each.

    Args:
        entries: (entry, its tensors, the ranks that hold it). A file is written by one of the ranks that
            hold its first entry, in turn, so that writers are spread over stages, shards and replicas.
    """
    groups: list[list[tuple[Entry, list[TensorSpec], list[int]]]] = []
    size = 0
    for item in entries:
        nbytes = sum(spec.nbytes for spec in item[1])
        if not groups or size + nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += nbytes
    return [
        FilePlan(
            name=SINGLE if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors",
            entries=[entry for entry, _, _ in group],
            specs=[spec for _, specs, _ in group for spec in specs],
            writer=group[0][2][i % len(group[0][2])],
        )
        for i, group in enumerate(groups)
    ]


def write_index(directory: Path, files: Sequence[tuple[str, Sequence[TensorSpec]]]) -> None:
    """Write the index of a sharded checkpoint; a single file needs none."""
    if [name for name, _ in files] == [SINGLE]:
        return
    index = {
        "metadata": {"total_size": sum(spec.nbytes for _, specs in files for spec in specs)},
        "weight_map": {spec.name: name for name, specs in files for spec in specs},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy config.json, naming `dtype` in it (None: as it is), generation config and tokenizer."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"  # transformers 4 and 5 spell it so
        config[key] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write(exporter: Exporter, plan: list[FilePlan], stage: Path) -> str | None:
    """Collect every file's entries on its writer. Returns what went wrong here; goes on to the end anyway."""
    error = None
    file_of = {entry.names: file for file in plan for entry in file.entries}
    streams: dict[str, SafetensorsStream] = {}
    # Files of different writers are filled side by side, so that all of them write at once.
    wanted = [(e, file_of[e.names].writer) for e in _interleaved(plan)]
    with ExitStack() as stack:
        for entry, tensors in exporter.collect(wanted):
            if tensors is None or error is not None:
                continue
            file = file_of[entry.names]
            try:
                if file.name not in streams:
                    stream = SafetensorsStream(stage / file.name, file.specs)
                    streams[file.name] = stack.enter_context(stream)
                for name, tensor in zip(entry.hf, tensors, strict=True):
                    streams[file.name].add(name, tensor)
            except OSError as problem:
                error = f"cannot write {stage / file.name}: {problem}"
        if error is not None:
            stack.pop_all()  # the streams would complain that they are incomplete
            for stream in streams.values():
                stream.close()
    return error


def _interleaved(plan: list[FilePlan]) -> list[Entry]:
    """All entries: one of each writer's first file in turn, then of the second files, and so on."""
    queues: dict[int, list[FilePlan]] = {}
    for file in plan:
        queues.setdefault(file.writer, []).append(file)
    order = []
    for wave in zip_longest(*queues.values()):
        files = [file.entries for file in wave if file is not None]
        order += [entry for row in zip_longest(*files) for entry in row if entry is not None]
    return order


def _write_companions(
    stage: Path, source: Path, plan: list[FilePlan], dtype: torch.dtype, card: str | None
) -> None:
    write_index(stage, [(file.name, file.specs) for file in plan])
    copy_companions(source, stage, dtype)
    if card is not None:
        (stage / "README.md").write_text(card, encoding="utf-8")


def _check(directory: str | Path, source_dir: str | Path) -> None:
    refuse_existing(directory)
    if not (Path(source_dir) / "config.json").is_file():
        raise UserError(f"{source_dir} has no config.json to go with the weights")


def _attempt(work) -> str | None:
    try:
        work()
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"cannot write the checkpoint: {error}"
    return None


def _agree(error: str | None) -> None:
    """Raise on every rank what went wrong on any."""
    errors = [error]
    if dist.is_initialized() and dist.get_world_size() > 1:
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    found = next((e for e in errors if e is not None), None)
    if found is not None:
        raise UserError(found)


def _from_rank_0(value: str) -> str:
    box = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]
