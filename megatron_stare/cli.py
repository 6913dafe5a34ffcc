"""The command `megatron-stare`. Each command is a few lines over the package; heavy imports wait.

Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 75 preempted and saved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from megatron_stare import __version__
from megatron_stare.errors import Preempted, UserError
from megatron_stare.launch.command import launch_options
from megatron_stare.plan.command import plan_options
from megatron_stare.run.convert_options import convert_options, inspect_options

DONE, FAILED, BAD_USAGE, PREEMPTED = 0, 1, 2, 75


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="megatron-stare")
def app() -> None:
    """RL post-training of language models on Megatron-core and SGLang, with entropy held by STARE."""


_config = click.argument("config", type=click.Path(path_type=Path))
_overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


@app.command()
@_config
@_overrides
@click.option("--print-config", is_flag=True, help="Show the whole resolved configuration, and stop.")
def train(config: Path, overrides: tuple[str, ...], print_config: bool) -> int:
    """Train with the configuration in the file CONFIG.

    Each KEY=VALUE overrides it, for example optimizer.lr=2e-6 or resume.mode=auto. Values are YAML.
    """
    from megatron_stare.config.load import dump_config, load_config

    loaded = load_config(config, list(overrides))
    if print_config:
        click.echo(dump_config(loaded), nl=False)
        return DONE
    from megatron_stare.run import supervisor
    from megatron_stare.run.job import Job

    return supervisor.train(loaded, Job.from_environment(loaded))


@app.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("step", type=click.IntRange(min=0))
def replay(run: Path, step: int) -> int:
    """Compute STEP (from 0) of the run directory RUN again, and compare it with what was recorded.

    From the checkpoint before it and the journal of rollouts; no server is started, and nothing of the run
    is changed. Exit code 1 if any figure differs.
    """
    from megatron_stare.run.replay import replay as start

    return DONE if start(run, step) else FAILED


@app.command()
@_config
@_overrides
@launch_options
def launch(config: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Run CONFIG on several nodes: write the job's files into RUN/launch, and submit it.

    A job that is stopped in time, or whose node dies, is started again and goes on where it was.
    """
    from megatron_stare.launch.command import launch_command

    launch_command(config, list(overrides), **options)


@app.command()
@click.argument("run_directory", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def status(run_directory: Path, as_json: bool) -> int:
    """Show what the run in the directory RUN does: where, since when, at which step, and what went wrong.

    Exit code 0 while it runs and when it is done or stopped and saved, 1 if it failed or is dead, 2 if there
    is no run.
    """
    from megatron_stare.run.status import show_status

    return show_status(run_directory, as_json)


@app.command()
@_config
@_overrides
def serve(config: Path, overrides: tuple[str, ...]) -> int:
    """Start the SGLang servers and the router of CONFIG, and keep them until Ctrl-C."""
    from megatron_stare.config.load import load_config

    loaded = load_config(config, list(overrides))
    from megatron_stare.run import supervisor

    return supervisor.serve(loaded)


@app.command()
@_overrides
@click.option("--dir", "directory", type=click.Path(path_type=Path), default=Path("runs/quickstart"))
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the policy, the data and sampling.")
def quickstart(overrides: tuple[str, ...], directory: Path, seed: int) -> int:
    """Train a tiny policy with GRPO and with GRPO + STARE, and compare. Needs no GPU and no downloads."""
    from megatron_stare.run.quickstart import quickstart as start

    return start(directory.resolve(), seed, list(overrides))


@app.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--quant", type=click.Choice(["fp8", "fp8_blockwise"]), required=True,
              help="fp8: ModelOpt, per tensor, calibrated. fp8_blockwise: blocks of 128 x 128.")
@click.option("--calibration", metavar="DATA", help="Prompts: a .jsonl or .parquet file. fp8 needs them.")
@click.option("--samples", type=click.IntRange(min=1), default=128, show_default=True,
              help="Rows of DATA to calibrate on.")
@click.option("--verify/--no-verify", default=True, help="Compare the result with SRC before publishing it.")
@click.option("--limit", type=click.FloatRange(min=0, min_open=True), default=0.5, show_default=True,
              help="Largest mean difference of log-probs that is published, in nats.")
def export(source: Path, target: Path, **options: Any) -> None:
    """Quantise the Hugging Face checkpoint SRC to FP8, into the new directory OUT."""
    from megatron_stare.quant import export_fp8

    click.echo(export_fp8(source, target, **options).summary(target))


@app.command()
@_config
@_overrides
@plan_options
def plan(config: Path, overrides: tuple[str, ...], **options: Any) -> int:
    """Predict what CONFIG needs: memory, communication, time. Needs no GPU and no weights.

    Exit code 1 if it does not fit, or breaks a rule.
    """
    from megatron_stare.plan.command import plan_command

    return DONE if plan_command(config, list(overrides), **options) else FAILED


@app.command()
@convert_options
def convert(**options: Any) -> None:
    """Convert the checkpoint SRC into the new directory OUT, Hugging Face to Megatron or back.

    SRC is a Hugging Face directory, a Megatron distributed checkpoint, or the directory of a run.
    """
    from megatron_stare.run.convert import convert as start

    start(**options)


@app.command()
@inspect_options
def inspect(**options: Any) -> int:
    """Show what the checkpoint at PATH holds, and check it. Exit code 1 if a check fails."""
    from megatron_stare.run.convert import inspect as start

    return DONE if start(**options) else FAILED


def run(arguments: Sequence[str] | None = None, command: click.Command = app) -> int:
    """Runs a command line (default: this process's) and returns its exit code."""
    name = "megatron-stare" if command is app else None
    try:
        code = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return FAILED
    except Preempted:
        return PREEMPTED
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return BAD_USAGE
    return code if isinstance(code, int) else DONE


def main() -> None:
    """The console script."""
    sys.exit(run())
