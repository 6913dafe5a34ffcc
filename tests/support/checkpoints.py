"""What a distributed checkpoint holds, read without Megatron."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every whole tensor of the checkpoint by its key: parameters, moments, steps."""
    reader = FileSystemReader(directory)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    return state
