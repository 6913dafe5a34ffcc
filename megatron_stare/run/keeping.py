"""What a run writes beside its metrics: checkpoints, exports, and how long its journal goes back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_stare.config.schema import Config
from megatron_stare.engine.engine import Engine
from megatron_stare.run.card import model_card
from megatron_stare.run.files import RunFiles
from megatron_stare.run.journal import Journal
from megatron_stare.run.state import RunState
from megatron_stare.weights.publication import published
from megatron_stare.weights.save import save_hf


class Keeping:
    """Every method is collective. A write that fails is a problem of the run, never its end.

    Args:
        journal: on rank 0, where there is one.
        saved: finished steps of the checkpoint that the run resumed from; 0 for none.
        on_problem: told what could not be written.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        files: RunFiles,
        journal: Journal | None,
        saved: int,
        on_problem: Callable[[str], None],
    ) -> None:
        self._config, self._engine = config, engine
        self._journal, self._on_problem = journal, on_problem
        self._saved = saved
        kept = config.checkpoint
        self._checkpoints = engine.checkpoints(
            files.checkpoints, keep_last=kept.keep_last, keep_every=kept.keep_every
        )

    def save(self, state: RunState, *, wait: bool) -> str | None:
        """Write a checkpoint of `state`, which the engine must be in, unless it is there already.

        With `wait` it is published on return, or the problem is returned; else a later `poll` does so.
        """
        self.poll(wait=True)
        if state.steps == self._saved:
            return None
        self._engine.save(self._checkpoints, state.steps, state.to_json(), background=not wait)
        self._saved = state.steps
        return self.poll(wait=wait)

    def poll(self, *, wait: bool = False) -> str | None:
        """Publish the save that is under way if it is written; with `wait`, when it is. Returns a problem."""
        outcome = self._checkpoints.poll(wait=wait)
        if outcome is None:
            return None
        if outcome.problem:
            self._on_problem(f"no checkpoint after {outcome.step} steps: {outcome.problem}")
            self._saved = -1
        elif self._journal and (kept := published(self._checkpoints.directory)):
            self._journal.forget_before(kept[-1][0])
        return outcome.problem

    def export(self, directory: Path, steps: int, metrics: dict[str, float]) -> None:
        """Write the policy as a Hugging Face checkpoint, in place of an earlier one."""
        if self._engine.parallel.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        card = model_card(self._config, steps, metrics)
        save_hf(directory, self._engine.exporter, self._config.model.path, card=card)
