"""What a checkpoint on disk holds, and whether it is whole."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_stare.errors import UserError
from megatron_stare.weights.convert import TO_HF, gigabytes, locate
from megatron_stare.weights.dcp import Description, StoredTensor, read_description
from megatron_stare.weights.hf_config import HFConfig, read_hf_config
from megatron_stare.weights.mapping import model_entries
from megatron_stare.weights.pread import TensorFiles
from megatron_stare.weights.publication import MANIFEST, find_damage
from megatron_stare.weights.source import CheckpointSource, check_source
from megatron_stare.weights.to_hf import check_tensors
from megatron_stare.weights.vocabulary import check_vocabulary

_NUMBER = re.compile(r"\.(\d+)(?=\.)")
_STEP = re.compile(r"(?:step|iter)_(\d{7,})")
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2}  # others: one


@dataclass
class Row:
    """Tensors of one name, layers and experts folded into ranges.

    Attributes:
        count: how many tensors it stands for.
        parts: into how many chunks each is cut in the files (Megatron: by tensor parallelism, or gate and
            up apart).
    """

    name: str
    shape: list[int]
    dtype: str
    count: int
    parameters: int
    nbytes: int
    parts: int = 1


@dataclass
class Check:
    """A question and its answer; `problem` is empty where all is well."""

    name: str
    problem: str = ""


@dataclass
class Report:
    """Everything that `inspect` prints.

    Attributes:
        form: "huggingface" or "megatron".
        step: training steps, of a run's checkpoint.
        saved_at_tp: tensor-parallel size of the run that saved it.
        optimizer_bytes: size of the optimizer's state; None: there is none.
        disk_bytes: size of all files.
    """

    path: str
    form: str
    architecture: str
    rows: list[Row]
    disk_bytes: int
    step: int | None = None
    saved_at_tp: int | None = None
    optimizer_bytes: int | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def weight_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def passed(self) -> bool:
        return not any(check.problem for check in self.checks)

    def to_json(self) -> str:
        """For machines."""
        totals = {"parameters": self.parameters, "weight_bytes": self.weight_bytes, "passed": self.passed}
        return json.dumps({**asdict(self), **totals})

    def lines(self) -> list[str]:
        """For people, below the table."""
        step = [] if self.step is None else [f"step {self.step}"]
        layout = [] if self.saved_at_tp is None else [f"saved at tp={self.saved_at_tp}"]
        state = "no optimizer state"
        if self.optimizer_bytes is not None:
            state = f"optimizer state of {gigabytes(self.optimizer_bytes)}"
        return [
            ", ".join([f"{self.form}, {self.architecture}", *step, *layout, state]),
            f"{self.parameters:,} parameters, {gigabytes(self.weight_bytes)} of weights, "
            f"{gigabytes(self.disk_bytes)} on disk",
            *(f"FAILED  {c.name}: {c.problem}" if c.problem else f"ok  {c.name}" for c in self.checks),
        ]


def inspect(
    path: str | Path,
    *,
    hf_config: str | Path | None = None,
    check_values: bool = False,
    advance: Callable[[int], None] = lambda _bytes: None,
) -> Report:
    """Look at a checkpoint; reads no weights unless `check_values`, and then one chunk at a time.

    Args:
        path: a Hugging Face directory, a Megatron checkpoint, or a run's directory.
        hf_config: directory with config.json, for a Megatron checkpoint without.
        check_values: look for NaN and infinite numbers.
        advance: called with the bytes that `check_values` has looked at.

    Raises:
        UserError: there is no checkpoint. What is wrong with one is in the report.
    """
    directory, direction = locate(Path(path))
    look = _megatron if direction == TO_HF else _huggingface
    report, values = look(directory, Path(hf_config) if hf_config else directory)
    if check_values:
        if (directory / MANIFEST).exists():
            damage = find_damage(directory)
            report.checks.append(Check("files have the checksums that they were written with", damage or ""))
        report.checks.append(_attempt("values are finite", lambda: _check_values(values, advance)))
    return report


def _huggingface(directory: Path, config_dir: Path) -> tuple[Report, Iterator[tuple[str, Tensor]]]:
    config, config_check = _config(config_dir)
    opened: list[CheckpointSource] = []
    files = _attempt("files are whole", lambda: opened.append(CheckpointSource(directory)))
    checks = [config_check, files]
    source = opened[0] if opened else None
    if source is not None and config is not None:
        entries = model_entries(config)
        checks.append(_attempt("tensors fit config.json", lambda: check_source(source, entries, config)))
        checks.append(_tokenizer_check(config_dir, config))
    slices = {name: source.slice(name) for name in source or ()}
    rows = _folded((name, s.get_shape(), s.get_dtype()) for name, s in slices.items())
    report = Report(str(directory), "huggingface", _name(config), rows, _disk_bytes(directory), checks=checks)
    return report, _safetensors_values(directory, source)


def _megatron(directory: Path, config_dir: Path) -> tuple[Report, Iterator[tuple[str, Tensor]]]:
    config, config_check = _config(config_dir)
    opened: list[Description] = []
    files = _attempt("files are whole", lambda: opened.append(read_description(directory)))
    checks = [config_check, files]
    stored = opened[0].tensors if opened else {}
    weights = {key: t for key, t in stored.items() if not _is_optimizer(key)}
    optimizer = [t.nbytes for key, t in stored.items() if _is_optimizer(key)]
    objects = [s.length for key, s in opened[0].objects.items() if _is_optimizer(key)] if opened else []
    rows = [
        Row(key, list(t.shape), _dtype(t.dtype), 1, math.prod(t.shape), t.nbytes, _parts(t))
        for key, t in weights.items()
    ]
    if opened and config is not None:
        entries = [entry for entry in model_entries(config) if not entry.copy]
        checks.append(
            _attempt("tensors fit config.json", lambda: check_tensors(weights, entries, config, directory))
        )
        checks.append(_tokenizer_check(config_dir, config))
    report = Report(
        str(directory),
        "megatron",
        _name(config),
        sorted(rows, key=lambda row: row.name),
        _disk_bytes(directory),
        step=_step(directory),
        saved_at_tp=next((row.parts for row in rows if row.name.endswith("linear_proj.weight")), None),
        optimizer_bytes=sum(optimizer) + sum(objects) if optimizer or objects else None,
        checks=checks,
    )
    return report, _chunk_values(directory, weights)


def _attempt(name: str, work: Callable[[], Any]) -> Check:
    try:
        work()
    except UserError as error:
        return Check(name, str(error))
    return Check(name)


def _config(directory: Path) -> tuple[HFConfig | None, Check]:
    found: list[HFConfig] = []
    check = _attempt("config.json is of a known family", lambda: found.append(read_hf_config(directory)))
    return (found[0] if found else None), check


def _tokenizer_check(directory: Path, config: HFConfig) -> Check:
    return _attempt("tokenizer fits", lambda: check_vocabulary(directory, config.vocab_size))


def _check_values(tensors: Iterator[tuple[str, Tensor]], advance: Callable[[int], None]) -> None:
    for name, tensor in tensors:
        wrong = tensor.numel() - int(torch.isfinite(tensor).sum())
        if wrong:
            raise UserError(f"{name} has {wrong} numbers that are NaN or infinite")
        advance(tensor.numel() * tensor.element_size())


def _safetensors_values(directory: Path, source: CheckpointSource | None) -> Iterator[tuple[str, Tensor]]:
    reader = TensorFiles(directory)
    for name in source or ():
        yield name, reader.slice(source.file(name).name, name)[:]
    reader.close()


def _chunk_values(directory: Path, tensors: dict[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    reader = TensorFiles(directory)
    for key, tensor in tensors.items():
        for chunk in tensor.chunks:
            yield key, reader.box((chunk,), chunk.offsets, chunk.sizes, tensor.dtype)
    reader.close()


def _folded(tensors: Iterable[tuple[str, list[int], str]]) -> list[Row]:
    """One row for all tensors whose names differ only in numbers, given as (name, shape, dtype)."""
    groups: dict[tuple, list[list[int]]] = {}
    for name, shape, dtype in tensors:
        key = (_NUMBER.sub(".{}", name), tuple(shape), dtype)
        groups.setdefault(key, []).append([int(number) for number in _NUMBER.findall(name)])
    rows = []
    for (pattern, shape, dtype), numbers in groups.items():
        spans = [(min(column), max(column)) for column in zip(*numbers, strict=True)]
        name = pattern.format(*(f"[{a}-{b}]" if a != b else str(a) for a, b in spans))
        parameters = math.prod(shape) * len(numbers)
        nbytes = parameters * _BYTES.get(dtype, 1)
        rows.append(Row(name, list(shape), dtype, len(numbers), parameters, nbytes))
    return rows


def _parts(tensor: StoredTensor) -> int:
    places = {chunk.offsets[: max(0, len(tensor.shape) - 2)] for chunk in tensor.chunks}
    return max(1, len(tensor.chunks) // max(1, len(places))) if len(tensor.shape) > 2 else 1


def _is_optimizer(key: str) -> bool:
    return key.startswith(("optimizer", "chained_"))


def _step(directory: Path) -> int | None:
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else None


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(config: HFConfig | None) -> str:
    return config.architecture if config else "unknown architecture"


def _disk_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
