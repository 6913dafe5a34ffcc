"""Options of the commands that convert and inspect, shared with checkpoints_tools; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

_DTYPES = click.Choice(["float32", "bfloat16"])


def convert_options(command: Callable) -> Callable:
    """The options of every command that converts."""
    for option in reversed(
        (
            click.argument("source", metavar="SRC", type=click.Path(path_type=Path)),
            click.argument("target", metavar="OUT", type=click.Path(path_type=Path)),
            click.option("--dtype", type=_DTYPES, help="Of all tensors; default: as stored."),
            click.option("--workers", type=click.IntRange(1), help="Default: one process a core, at most 8."),
            click.option(
                "--max-shard-gb",
                type=click.FloatRange(0, min_open=True),
                default=4.0,
                show_default=True,
                help="Largest weight file of a Hugging Face directory, in 10^9 bytes.",
            ),
            click.option(
                "--vocab-multiple",
                type=click.IntRange(1),
                default=128,
                show_default=True,
                help="Rows of a Megatron vocabulary are padded to a multiple of it.",
            ),
            click.option(
                "--hf-config",
                type=click.Path(path_type=Path),
                help="Directory with config.json and tokenizer, for a Megatron checkpoint without them.",
            ),
            click.option("--verify", is_flag=True, help="Compare log-probs before OUT gets its name."),
            click.option("--dry-run", is_flag=True, help="Check everything, print the plan, and stop."),
        )
    ):
        command = option(command)
    return command


def inspect_options(command: Callable) -> Callable:
    """The options of every command that inspects."""
    for option in reversed(
        (
            click.argument("path", metavar="PATH", type=click.Path(path_type=Path)),
            click.option(
                "--hf-config",
                type=click.Path(path_type=Path),
                help="Directory with config.json, for a Megatron checkpoint without it.",
            ),
            click.option("--check-values", is_flag=True, help="Read all weights, look for NaN and infinity."),
            click.option("--json", "as_json", is_flag=True, help="One JSON object, for machines."),
        )
    ):
        command = option(command)
    return command
