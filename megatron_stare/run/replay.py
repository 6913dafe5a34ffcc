"""`megatron-stare replay RUN STEP`: a step computed again, from the checkpoint before it and the journal."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_stare.config import Config, check_config, load_config
from megatron_stare.errors import UserError
from megatron_stare.report import read_metrics
from megatron_stare.rollout.child import die_with_parent
from megatron_stare.rollout.process import end
from megatron_stare.run.files import RunFiles
from megatron_stare.run.job import Job
from megatron_stare.run.node import torchrun

# What a replay cannot or need not repeat: times, what sampling cost, evaluations.
_NOT_COMPARED = ("time/", "timestamp", "eval/")
_SHOWN = ("loss", "grad_norm", "entropy", "reward/mean")
_POLL_SECONDS = 0.2


def replay(run: Path, step: int) -> bool:
    """Compute `step` (from 0) of the run directory `run` again, and print it beside what was recorded.

    Returns whether all figures are equal to the bit. Nothing of the run is changed. Raises UserError where
    the step was not recorded, no checkpoint leads to it, or its rollouts are gone.
    """
    files = RunFiles(run.resolve())
    if not files.config.is_file():
        raise UserError(f"{run}: no config.yaml there; give a run directory")
    recorded = {row["step"]: row for row in read_metrics(files.metrics)}
    if step not in recorded:
        raise UserError(f"step {step} is not in {files.metrics}, which has {_span(recorded)}")
    config = _replayed(load_config(files.config))
    job = Job.single(config)
    check_config(config, job.world_size)
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        program = ["megatron_stare.run.replay", str(files.root), str(step), str(result)]
        ranks = torchrun(program, files, job, {}, restarts=0)
        try:
            while ranks.exit_reason() is None:
                time.sleep(_POLL_SECONDS)
        finally:
            end([ranks])
        if not result.exists():
            raise UserError(f"the replay {ranks.exit_reason()}; see {files.logs}/replay-0.log")
        found = json.loads(result.read_text(encoding="utf-8"))
    if "error" in found:
        raise UserError(found["error"])
    return _show(step, found["started"], recorded[step], found["row"])


def _replayed(config: Config) -> Config:
    """The run's config without what a replay leaves out: evaluations, checkpoints, exports."""
    quiet = {
        "evaluation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0, "hf_every": 0},
        "resume": {"mode": "auto"},
    }
    changes = {name: getattr(config, name).model_copy(update=values) for name, values in quiet.items()}
    return config.model_copy(update=changes)


def _span(recorded: Mapping[int, Any]) -> str:
    return f"steps {min(recorded)} to {max(recorded)}" if recorded else "no steps"


def _show(step: int, started: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    names = [name for name in before if name in now and not name.startswith(_NOT_COMPARED)]
    different = [name for name in names if before[name] != now[name]]
    table = Table(title=f"step {step}, from the checkpoint after {started} steps")
    for column in ("", "recorded", "replayed"):
        table.add_column(column, justify="left" if not column else "right")
    for name in dict.fromkeys([*(n for n in _SHOWN if n in names), *different]):
        table.add_row(name, repr(before[name]), repr(now[name]))
    console = Console()
    console.print(table)
    equal = len(names) - len(different)
    console.print(f"{equal} of {len(names)} figures are equal to the bit", highlight=False)
    return not different


class Recorder:
    """Takes the place of the reporter: keeps the last step's figures."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}

    def status(self, phase: str) -> None:
        """Nobody watches."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep this step's figures, as metrics.jsonl holds them."""
        from megatron_stare.report.metrics import plain

        self.row = {"step": step, **{name: plain(value) for name, value in metrics.items()}}

    def close(self, outcome: str) -> None:
        """Nothing to end."""


class JournalSource:
    """Takes the place of the sampler: gives what was sampled."""

    def __init__(self, journal, tokenizer) -> None:
        self._journal, self._tokenizer = journal, tokenizer

    def collect(self, step: int, weight_version: int, status):
        """The step's rollouts. Raises UserError where the journal has none."""
        from megatron_stare.tasks import fill_texts

        rollouts = self._journal.read(step)
        if rollouts is None:
            raise UserError(f"the rollouts of step {step} are not in the journal any more")
        fill_texts(self._tokenizer, rollouts.groups)
        return rollouts

    def should_stop(self) -> bool:
        """A replay is not asked."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Nothing depends on it here."""
        return {}

    def close(self) -> None:
        """Nothing to end."""


def _run(files: RunFiles, step: int) -> dict[str, Any]:
    """On every rank: load, train up to and with `step`. Returns what rank 0 found."""
    from megatron_stare.engine.parallel import shut_down
    from megatron_stare.run.build import build_engine, model_shape, open_journal, restore
    from megatron_stare.run.keeping import Keeping
    from megatron_stare.run.resume import saved_values
    from megatron_stare.run.session import Session
    from megatron_stare.run.supervised import RowFeed
    from megatron_stare.run.trainer import train, train_supervised
    from megatron_stare.tasks import load_tokenizer

    config = _replayed(load_config(files.config))
    engine = build_engine(config)
    state = restore(config, engine, files, at_most=step)
    source = recorder = None
    if engine.parallel.rank == 0:
        tokenizer = load_tokenizer(config.model.path)
        if config.objective == "rl":
            journal = open_journal(config, files)
            if journal is None:
                raise UserError("checkpoint.journal=false: the run keeps no rollouts to be replayed")
            source = JournalSource(journal, tokenizer)
        else:
            source = RowFeed(config, tokenizer, lambda: False)
            if state.source:
                source.load_state_dict(state.source)
        recorder = Recorder()
    session = Session(
        config,
        engine,
        files,
        source=source,
        publisher=None,
        reporter=recorder,
        keeping=Keeping(config, engine, files, None, saved=state.steps, on_problem=print),
        pulse=None,
        state=state,
        bound=saved_values(config, model_shape(engine)),
        steps=step + 1,
    )
    (train if config.objective == "rl" else train_supervised)(session)
    shut_down()
    return {"started": state.steps, "row": recorder.row if recorder else {}}


def main() -> None:
    """One rank of a replay, under torchrun."""
    from megatron_stare.run.worker import leave, log_to_file

    die_with_parent()
    files, step, result = RunFiles(Path(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
    rank = int(os.environ.get("RANK", "0"))
    log_to_file(files, f"replay-{rank}", rank)
    try:
        found = _run(files, step)
    except UserError as error:
        found = {"error": str(error)}
    if rank == 0:
        result.write_text(json.dumps(found), encoding="utf-8")
    leave(0)


if __name__ == "__main__":
    main()
