"""Saves while training goes on, published once all ranks have written their shares (staging.py).

All ranks call `save` and `poll` at the same points. Nothing here raises for a disk that fails: training goes
on without that checkpoint, and the outcome says why.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, is_main_replica

from megatron_stare.engine import checkpoint
from megatron_stare.engine.parallel import Parallel
from megatron_stare.engine.staging import Staging, Write
from megatron_stare.weights import publication
from megatron_stare.weights.convert import gigabytes
from megatron_stare.weights.save import copy_companions

_SPARE_SHARE, _SPARE_BYTES = 0.05, 1 << 20


@dataclass(frozen=True)
class Outcome:
    """How a save of `step` finished steps ended: published, or with a problem in a sentence."""

    step: int
    problem: str | None = None


@dataclass
class _Saving:
    """A save under way."""

    step: int
    run_state: dict[str, Any]
    request: Any  # Megatron's; or what is in its way, in a sentence
    write: Write | None = None


class Checkpoints:
    """A run's checkpoints. Every method is collective over all ranks.

    Args:
        directory: made at the first save.
        hf_dir: config.json and tokenizer from here lie beside the weights, so that a checkpoint can be
            converted without anything else.
        keep_last, keep_every: see `publication.prune`.
    """

    def __init__(
        self,
        directory: Path,
        parallel: Parallel,
        *,
        hf_dir: str | Path,
        keep_last: int,
        keep_every: int = 0,
    ) -> None:
        self.directory, self._parallel = directory, parallel
        self._hf_dir = Path(hf_dir)
        self._keep = (keep_last, keep_every)
        self._staging = Staging()
        self._saving: _Saving | None = None

    def save(self, step: int, models, optimizer, run_state: dict[str, Any], *, background: bool) -> None:
        """Begin to write the checkpoint after `step` steps; `poll` tells the outcome.

        Models and optimizer may change once `settle` has returned. One save is under way at a time: call
        `poll(wait=True)` first. Without `background` all is written on return, but not yet published.
        """
        if self._saving:
            raise RuntimeError(f"the save of step {self._saving.step} is still under way")
        aside = self._aside(step)
        state = checkpoint.sharded_state(models, optimizer, is_loading=False)
        size = self._total(_own_bytes(state))
        problem = self._on_rank_0(lambda: self._prepare(aside, size))
        if problem:
            self._saving = _Saving(step, run_state, problem)
            return
        request = checkpoint.request_save(state, aside)
        write = None
        if request.async_fn:  # else nothing of the state is this rank's to write
            write = self._staging.write(request, aside, self._parallel.rank, background=background)
            if not background:
                write.wait()
        self._saving = _Saving(step, run_state, request, write)

    def settle(self) -> None:
        """Wait until models and optimizer may change."""
        if self._saving and self._saving.write:
            self._saving.write.settle()

    def poll(self, *, wait: bool = False) -> Outcome | None:
        """Publish the save that is under way once all ranks have written it; None until then."""
        saving = self._saving
        if saving is None:
            return None
        if wait and saving.write:
            saving.write.wait()
        if self._total(int(saving.write is not None and not saving.write.done)):
            return None
        self._saving = None
        if isinstance(saving.request, str):
            return Outcome(saving.step, saving.request)
        try:
            for finalize in saving.request.finalize_fns:
                finalize()
            problem = None
        except Exception as error:  # Megatron raises on all ranks when any has failed
            problem = f"it could not be written: {_cause(error)}"
        problem = self._on_rank_0(lambda: self._publish(saving, problem))
        return Outcome(saving.step, problem)

    def _total(self, value: int) -> int:
        """The sum of what all ranks give."""
        box = torch.tensor([value], device=self._parallel.device)
        dist.all_reduce(box)
        return int(box)

    def _on_rank_0(self, work: Callable[[], str | None]) -> str | None:
        """What `work` returns on rank 0, which alone does it."""
        return self._parallel.agree_on(work() if self._parallel.rank == 0 else None)

    def _aside(self, step: int) -> Path:
        return self.directory / f"{publication.directory_name(step)}.tmp"

    def _prepare(self, aside: Path, size: int) -> str | None:
        """On rank 0: an empty directory with room for `size` bytes. Returns a problem."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            publication.remove_unfinished(self.directory)
            free, needed = shutil.disk_usage(self.directory).free, size * (1 + _SPARE_SHARE) + _SPARE_BYTES
            if free < needed:
                return (
                    f"the disk is nearly full: {self.directory} has {gigabytes(free)} left, "
                    f"the checkpoint needs {gigabytes(needed)}"
                )
            aside.mkdir()
        except OSError as error:
            return f"it could not be written: {error}"
        return None

    def _publish(self, saving: _Saving, problem: str | None) -> str | None:
        """On rank 0: give the checkpoint its name, and delete what it supersedes. Returns a problem."""
        aside = self._aside(saving.step)
        try:
            if problem is None:
                copy_companions(self._hf_dir, aside, None)
                publication.write_json(aside / publication.RUN_STATE, saving.run_state)
                publication.publish(aside, self.directory / publication.directory_name(saving.step))
                publication.prune(self.directory, *self._keep)
        except OSError as error:
            problem = f"it could not be published: {error}"
        if problem:
            shutil.rmtree(aside, ignore_errors=True)
        return problem


@dataclass(frozen=True)
class Found:
    """A checkpoint that was verified."""

    step: int
    path: Path
    run_state: dict[str, Any]


def newest_good(
    directory: Path,
    parallel: Parallel,
    on_problem: Callable[[str], None],
    *,
    at_most: int | None = None,
    move: bool = True,
) -> tuple[Found | None, list[str]]:
    """The newest checkpoint whose files are what was written, and what is wrong with newer ones; collective.

    Each rank verifies its share of the files. Damaged ones are set aside where `move` says so, and
    `on_problem` is told, on rank 0. `at_most`: pass over those after more steps.
    """
    problems = []
    candidates = parallel.agree_on(publication.published(directory) if parallel.rank == 0 else None)
    for step, path in candidates:
        if at_most is not None and step > at_most:
            continue
        mine = publication.find_damage(path, slice(parallel.rank, None, parallel.world_size))
        damages: list[str | None] = [None] * parallel.world_size
        dist.all_gather_object(damages, mine)
        damage = next(filter(None, damages), None)
        if damage is None:
            return Found(step, path, parallel.agree_on(checkpoint.read_run_state(path))), problems
        problems.append(f"{path.name} is not used: {damage}")
        if parallel.rank == 0:
            if move:
                publication.set_aside(path)
            on_problem(problems[-1])
    return None, problems


def _own_bytes(state: dict[str, Any]) -> int:
    """Bytes of the tensors that this rank writes."""
    size = 0
    for value in nested_values(state):
        data = getattr(value, "data", None)
        if isinstance(value, ShardedBase) and is_main_replica(value.replica_id) and torch.is_tensor(data):
            size += data.nbytes
    return size


def _cause(error: BaseException) -> str:
    """The innermost reason, which Megatron wraps more than once."""
    text = str(error)
    return text.strip().splitlines()[-1][:300] if text.strip() else type(error).__name__
