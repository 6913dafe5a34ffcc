"""Convert a Hugging Face directory to a Megatron distributed checkpoint.

    python -m checkpoints_tools.hf_to_megatron SRC OUT

The same as `megatron-stare convert`, but a SRC of the other kind is refused.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from megatron_stare.cli import run
from megatron_stare.run.convert_options import convert_options


@click.command()
@convert_options
def main(**options: Any) -> None:
    """Convert the Hugging Face directory SRC to a Megatron distributed checkpoint, the new directory OUT."""
    from megatron_stare.run.convert import convert

    convert(direction="to_megatron", **options)


if __name__ == "__main__":
    sys.exit(run(command=main))
