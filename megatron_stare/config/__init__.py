"""The typed configuration of a run: schema, loading, and checks before anything starts."""

from __future__ import annotations

from megatron_stare.config.checks import check_config, find_problems, run_directory
from megatron_stare.config.load import ConfigError, config_keys, dump_config, load_config
from megatron_stare.config.schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "check_config",
    "config_keys",
    "dump_config",
    "find_problems",
    "load_config",
    "run_directory",
]
