"""Show what a checkpoint holds, and check it.

    python -m checkpoints_tools.inspect_checkpoint PATH

The same as `megatron-stare inspect`: exit code 1 if a check fails.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from megatron_stare.cli import run
from megatron_stare.run.convert_options import inspect_options


@click.command()
@inspect_options
def main(**options: Any) -> int:
    """Show what the checkpoint at PATH holds, and check it."""
    from megatron_stare.run.convert import inspect

    return 0 if inspect(**options) else 1


if __name__ == "__main__":
    sys.exit(run(command=main))
