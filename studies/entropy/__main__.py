"""`python -m studies.entropy run` and `report`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from megatron_stare.errors import UserError
from studies.entropy.settings import PARTS, runs

_HERE = Path(__file__).parent
_RESULTS = click.option(
    "--results", type=click.Path(path_type=Path), default=_HERE / "results", show_default="beside the code"
)
_PART = click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)), help="Default: all.")


@click.group(help="Entropy controls side by side, through the real trainer.")
def main() -> None:
    """The command."""


@main.command()
@_PART
@_RESULTS
@click.option("--dir", "directory", type=click.Path(path_type=Path), default=Path("runs/study-entropy"))
@click.option("--jobs", type=click.IntRange(1), default=len(os.sched_getaffinity(0)), show_default="cores")
@click.option("--list", "only_list", is_flag=True, help="Print the runs and stop.")
def run(parts: tuple[str, ...], results: Path, directory: Path, jobs: int, only_list: bool) -> None:
    """Make every result that is missing. Give another --results to make all of them anew."""
    from studies.entropy.execute import Study

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pairs = runs(parts or tuple(PARTS))
    study = Study(directory.absolute(), results.absolute())
    if only_list:
        for pair in pairs:
            click.echo(
                f"{'done' if study.result(*pair).exists() else 'to do'}  {pair[0].name} seed {pair[1]}"
            )
        return
    try:
        study.run(pairs, jobs)
    except UserError as error:
        raise click.ClickException(str(error)) from error


@main.command()
@_RESULTS
@click.option("--docs", type=click.Path(path_type=Path), default=_HERE.parents[1] / "docs")
def report(results: Path, docs: Path) -> None:
    """Write docs/images/study-*.png and print the tables."""
    from studies.entropy.report import write

    click.echo(write(results, docs / "images"))


if __name__ == "__main__":
    main()
