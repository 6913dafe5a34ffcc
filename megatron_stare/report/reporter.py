"""One object that takes a step's metrics and brings them everywhere they are wanted."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from megatron_stare.config.schema import Config
from megatron_stare.report.console import open_console
from megatron_stare.report.metrics import MetricsFile, plain
from megatron_stare.report.plots import plot_entropy
from megatron_stare.report.sinks import open_sinks
from megatron_stare.report.summary import Summary, summarise, table, write_summary

logger = logging.getLogger(__name__)

_SUBJECT = {"rl": "entropy and reward of the policy", "sft": "supervised training"}


class Reporter:
    """Metrics of a run to console, metrics.jsonl, entropy.png, TensorBoard and wandb; rank 0 only.

    Args:
        config: the run's configuration.
        run_dir: where the files go.
        total_steps: steps of the whole run, for the bar and the time left.
        start_step: the first step (from 0) that will be reported; above 0 after a resume.
        stream: the console; default stdout.

    Only metrics.jsonl may stop a run (a full disk); pictures and services that fail are logged.
    """

    def __init__(
        self,
        config: Config,
        run_dir: str | Path,
        total_steps: int,
        start_step: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        self._config = config
        self._run_dir = Path(run_dir)
        self._stream = stream or sys.stdout
        self._file = MetricsFile(self._run_dir / "metrics.jsonl", start_step)
        self._sinks = open_sinks(config, self._run_dir, start_step)
        self._clock, self._console = open_console(total_steps, start_step, self._stream)
        self._closed = False

    def status(self, phase: str) -> None:
        """Shows what the run is doing now (sampling, scoring, ...)."""
        self._console.status(phase)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records a finished step (from 0). Values are numbers or 0-dimensional tensors; NaN becomes null.

        `time/step`, the seconds since the last report, is added if it is not there.
        """
        row = {"step": int(step), **{name: plain(value) for name, value in metrics.items()}}
        seconds = self._clock.tick()
        row.setdefault("time/step", seconds)
        row["timestamp"] = time.time()
        self._file.append(row)
        self._console.step(row, row["time/step"] or seconds)
        for sink in list(self._sinks):
            try:
                sink.write(row)
            except Exception as error:
                logger.warning("step %d: %s failed and is dropped: %s", step, type(sink).__name__, error)
                self._sinks.remove(sink)
        every = self._config.report.plot_every
        if every and (step + 1) % every == 0:
            self._plot()

    def close(self, outcome: str) -> Summary | None:
        """Last picture, summary.md, and a table on the console. `outcome`: done, preempted, failed, ...

        A second call does nothing and returns None.
        """
        if self._closed:
            return None
        self._closed = True
        self._console.close()
        self._plot()
        for sink in self._sinks:
            try:
                sink.close(outcome)
            except Exception as error:
                logger.warning("closing %s failed: %s", type(sink).__name__, error)
        self._file.close()
        (self._run_dir / "summary.md").touch()
        summary = summarise(self._file.rows, self._config, outcome, self._run_dir)
        write_summary(summary, self._run_dir / "summary.md")
        console = Console(file=self._stream)
        console.print(table(summary))
        for name, value in summary.facts:
            console.print(f"{name}: {value}", highlight=False, markup=False)
        console.print(f"files: {self._run_dir}", highlight=False, markup=False, soft_wrap=True)
        return summary

    def _plot(self) -> None:
        stare = self._config.stare
        target = stare.target
        try:
            plot_entropy(
                self._file.rows,
                self._run_dir / "entropy.png",
                title=f"{self._config.run.name}: {_SUBJECT[self._config.objective]}",
                target=target,
            )
        except Exception as error:
            logger.warning("entropy.png could not be drawn: %s: %s", type(error).__name__, error)
