"""The commands `convert` and `inspect`: what people see of weights/convert.py and weights/inspect.py."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_stare.weights.convert import gigabytes, plan_conversion
from megatron_stare.weights.inspect import Report
from megatron_stare.weights.inspect import inspect as look

_TABLE_WIDTH = 140


def convert(
    source: Path,
    target: Path,
    *,
    direction: str | None = None,
    dtype: str | None,
    workers: int | None,
    max_shard_gb: float,
    vocab_multiple: int,
    hf_config: Path | None,
    verify: bool,
    dry_run: bool,
) -> None:
    """Convert the checkpoint at `source`; see `weights.convert.plan_conversion`."""
    conversion = plan_conversion(
        source,
        target,
        direction=direction,
        dtype=dtype and getattr(torch, dtype),
        workers=workers,
        max_shard_bytes=int(max_shard_gb * 1e9),
        vocab_multiple=vocab_multiple,
        hf_config=hf_config,
    )
    if dry_run:
        for line in conversion.lines():
            click.echo(line)
        return

    def check(stage: Path) -> None:
        from megatron_stare.engine.verify import verify_conversion

        click.echo(verify_conversion(conversion, stage))

    with _progress(conversion.read_bytes) as advance:
        conversion.run(advance, check if verify else None)
    click.echo(f"{conversion.source} -> {conversion.target}")


@contextmanager
def _progress(total: int | None):
    """A bar with bytes and GB/s on stderr, redrawn by `advance` and not by a thread: workers are forked."""
    progress = Progress(
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
    )
    with progress:
        task = progress.add_task("", total=total, speed="")
        begin, done = perf_counter(), 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            # The mean, as workers report in large and uneven steps.
            speed = done / 1e9 / (perf_counter() - begin)
            progress.update(task, advance=size, speed=f"{speed:.2f} GB/s", refresh=True)

        yield advance


def inspect(path: Path, *, hf_config: Path | None, check_values: bool, as_json: bool) -> bool:
    """Print what the checkpoint at `path` holds; whether all checks passed."""
    if check_values:
        with _progress(None) as advance:
            report = look(path, hf_config=hf_config, check_values=True, advance=advance)
    else:
        report = look(path, hf_config=hf_config)
    if as_json:
        click.echo(report.to_json())
    else:
        _print(report)
    return report.passed


def _print(report: Report) -> None:
    table = Table(box=None, title=report.path, title_justify="left")
    for heading in ("tensor", "shape", "dtype", "tensors", "parts", "parameters", "size"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("tensor", "shape") else "right")
    for row in report.rows:
        table.add_row(
            row.name,
            " x ".join(map(str, row.shape)),
            row.dtype,
            str(row.count),
            str(row.parts),
            f"{row.parameters:,}",
            gigabytes(row.nbytes),
        )
    # A narrow terminal breaks lines; a table would rather cut the names.
    console = Console(width=max(_TABLE_WIDTH, Console().width))
    console.print(table, markup=False)
    for line in report.lines():
        console.print(line, markup=False, highlight=False)
