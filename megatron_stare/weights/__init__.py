"""Hugging Face weights in and out of Megatron models: one table a family serves loading, export and sync."""

from megatron_stare.weights.export import Exporter
from megatron_stare.weights.files import staged_directory
from megatron_stare.weights.hf_config import HFConfig, read_hf_config
from megatron_stare.weights.load import load_hf_weights
from megatron_stare.weights.mapping import check_tp, global_parameters, tp_choices, unwrap
from megatron_stare.weights.save import save_hf
from megatron_stare.weights.tiny import write_tiny_checkpoint

__all__ = [
    "Exporter",
    "HFConfig",
    "check_tp",
    "global_parameters",
    "load_hf_weights",
    "read_hf_config",
    "save_hf",
    "staged_directory",
    "tp_choices",
    "unwrap",
    "write_tiny_checkpoint",
]
