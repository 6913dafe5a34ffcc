"""Hugging Face weights into Megatron models, each rank reading only its slices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from megatron_stare.weights.hf_config import HFConfig
from megatron_stare.weights.mapping import (
    check_tied,
    check_tp,
    global_parameters,
    match_entries,
    model_entries,
)
from megatron_stare.weights.source import CheckpointSource, check_source


def load_hf_weights(
    models: Sequence[nn.Module],
    hf_dir: str | Path,
    hf_config: HFConfig,
    *,
    tp_rank: int,
    tp_size: int,
) -> None:
    """Fill this rank's parameters, in place, from a Hugging Face checkpoint. Not a collective.

    Local and Transformer Engine parameter names are both understood. Values are cast to each parameter's
    dtype; rows of a padded vocabulary are zeros. Load before the optimizer is built, or call its
    `reload_model_params()` afterwards: it keeps float32 copies.

    Args:
        models: the rank's GPTModel chunks (one, or one a virtual pipeline stage), wrapped by
            Float16Module and DistributedDataParallel or not.
        hf_dir: directory with config.json and safetensors files, single or sharded with an index.
        hf_config: what `read_hf_config` says about it.
        tp_rank, tp_size: this rank's place in the tensor-parallel group.

    Raises:
        UserError: a file is missing or damaged, a tensor missing, unknown or of another shape, or
            tensor parallelism does not divide the model. All of it before any parameter is touched.
        ValueError: the models were not built from this config (tied embeddings).
    """
    check_tp(hf_config, tp_size)
    check_tied(models, hf_config)
    entries = model_entries(hf_config)
    source = CheckpointSource(hf_dir)
    check_source(source, entries, hf_config)
    pairs = match_entries(entries, global_parameters(models), tp_size)
    with torch.no_grad():
        for entry, parameter in pairs:
            slices = [source.slice(name) for name in entry.hf]
            size = entry.tp_size(tp_size)
            entry.layout.fill(parameter.data, slices, tp_rank % size, size)
