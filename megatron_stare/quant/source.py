"""What is exported: an unquantised Hugging Face directory, looked through before any work starts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_stare.errors import UserError
from megatron_stare.weights.dcp import is_megatron
from megatron_stare.weights.hf_config import HFConfig, read_hf_config
from megatron_stare.weights.layouts import QKV, GateUp, Row
from megatron_stare.weights.mapping import Entry, model_entries
from megatron_stare.weights.source import CheckpointSource, check_source
from megatron_stare.weights.stream import DTYPES


@dataclass(frozen=True)
class Source:
    """A checked checkpoint.

    Attributes:
        entries: its tensors by Megatron parameter, in Hugging Face's order; one entry is also what SGLang
            fuses into one linear (query, key and value; gate and up).
        dtype: what the tensors that are not quantised are stored in: float16 stays, all others become
            bfloat16 (SGLang computes FP8 models in these two only).
        nbytes: size of the tensors as they are stored.
    """

    directory: Path
    config: HFConfig
    tensors: CheckpointSource
    entries: list[Entry]
    dtype: torch.dtype
    nbytes: int

    @property
    def elements(self) -> tuple[int, int]:
        """Numbers of elements: of the linears' weights, of everything else."""
        linear = other = 0
        for entry in self.entries:
            for shape in entry.layout.hf_shapes:
                if is_linear(entry, shape):
                    linear += math.prod(shape)
                else:
                    other += math.prod(shape)
        return linear, other

    def linears(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every weight that is quantised."""
        return linears(self.entries)


def linears(entries: Iterable[Entry]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight among `entries` that is quantised."""
    return ((name, shape) for e in entries for name, shape in e.hf_tensors if is_linear(e, shape))


def is_linear(entry: Entry, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a layer's linear, which is quantised.

    Not embeddings and head, norms, biases, and routers.
    """
    return isinstance(entry.layout, (QKV, GateUp, Row)) and len(shape) == 2


def open_checkpoint(directory: str | Path) -> Source:
    """Open and check a checkpoint to be quantised.

    Raises:
        UserError: not an unquantised Hugging Face checkpoint of a known family; see `read_hf_config` and
            `check_source`.
    """
    directory = Path(directory)
    if is_megatron(directory):
        raise UserError(
            f"{directory} is a Megatron checkpoint; convert it to a Hugging Face one first: "
            f"megatron-stare convert"
        )
    _refuse_quantised(directory / "config.json")
    config = read_hf_config(directory)
    tensors = CheckpointSource(directory)
    entries = [entry for entry in model_entries(config) if not entry.copy]
    check_source(tensors, entries, config)
    slices = [tensors.slice(name) for name in tensors]
    dtypes = {name.get_dtype() for name in slices}
    return Source(
        directory=directory,
        config=config,
        tensors=tensors,
        entries=entries,
        dtype=torch.float16 if dtypes == {"F16"} else torch.bfloat16,
        nbytes=sum(math.prod(t.get_shape()) * DTYPES[t.get_dtype()].itemsize for t in slices),
    )


def _refuse_quantised(file: Path) -> None:
    """Say it for export; `read_hf_config` says it for training."""
    try:
        quantisation = json.loads(file.read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return  # read_hf_config says what is wrong with it
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else "unknown"
        raise UserError(
            f"{file}: the checkpoint is quantised already ({method}); export needs the unquantised weights"
        )
