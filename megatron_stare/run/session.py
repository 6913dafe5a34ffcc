"""A run as one rank sees it: the parts, what they hand each other, and the state between steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_stare.config.schema import Config
from megatron_stare.engine.batch import Microbatch
from megatron_stare.engine.engine import Engine
from megatron_stare.engine.step import Signals, UpdateStats
from megatron_stare.errors import Preempted, TrainingFailed
from megatron_stare.report import Reporter
from megatron_stare.run import policy
from megatron_stare.run.files import RunFiles
from megatron_stare.run.health import Pulse
from megatron_stare.run.journal import Rollouts
from megatron_stare.run.keeping import Keeping
from megatron_stare.run.metrics import group_metrics, merge_updates
from megatron_stare.run.problems import recorder
from megatron_stare.run.sampling import Sampler
from megatron_stare.run.serving import Serving
from megatron_stare.run.stare import Stare
from megatron_stare.run.state import RunState
from megatron_stare.run.supervised import RowFeed
from megatron_stare.stare import GateDecision
from megatron_stare.tasks.sample import Group


class Batch:
    """This replica's packed share of a step, whole and by optimizer update."""

    def __init__(self, engine: Engine, share: policy.Share):
        flat = engine.pack([mb for update in share.updates for mb in update])
        self.microbatches: list[Microbatch] = flat
        self.normalizers = share.normalizers
        self.slices: list[slice] = []
        start = 0
        for update in share.updates:
            self.slices.append(slice(start, start + len(update)))
            start += len(update)


class Session:
    """The parts of a run on this rank. `source`, `publisher`, `reporter` and `pulse` exist on rank 0 only.

    `steps`: where to stop, instead of at the run's end.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        files: RunFiles,
        *,
        source: Sampler | RowFeed | None,
        publisher,
        reporter: Reporter | None,
        keeping: Keeping,
        pulse: Pulse | None,
        state: RunState,
        bound: dict[str, Any],
        steps: int | None = None,
    ):
        self.config, self.engine, self.files = config, engine, files
        self.parallel = engine.parallel
        self.source, self.publisher, self.reporter = source, publisher, reporter
        self.keeping, self._pulse, self._bound = keeping, pulse, bound
        self._on_problem = recorder(files.problems, "trainer", self.parallel.rank)
        self._steps = steps or config.run.steps
        self.stare = Stare.of(config)
        if self.stare and state.stare:
            self.stare.load_state_dict(state.stare)
        self.steps_done = state.steps
        self._skipped = state.skipped
        on_problem = recorder(files.problems, "servers", self.parallel.rank)
        self._serving = Serving(config.rollout, engine, publisher, state.steps - 1, on_problem)
        self._times: dict[str, float] = {}
        self._sampling: dict[str, float] = {}
        self._quadrants: dict[str, float] = {}
        self._last_metrics: dict[str, float] = {}
        self._boundary = self._state()

    def remaining_steps(self) -> Iterator[int]:
        """Steps still to do, counted from 0 over the whole run."""
        while self.steps_done < self._steps:
            self._times = {}
            yield self.steps_done
            self.steps_done += 1
            self._boundary = self._state()
            if self._pulse:
                self._pulse.step(self.steps_done)
            self._keep()

    # --- the parts of an RL step, in the loop's order -------------------------------------------------

    def publish(self) -> None:
        """Give the servers the current weights; their version is the number of steps they have learned."""
        with self._timed("publish", "publishing"):
            self._serving.publish_next()

    def sample(self, step: int) -> list[Group] | None:
        """The step's scored groups, on rank 0. None elsewhere, or when the run is asked to stop."""
        with self._timed("sample"):
            rollouts = self._serving.ask(self.source and partial(self._collect, step))
        if rollouts is None:
            return None
        self._sampling = rollouts.figures
        return rollouts.groups

    def _collect(self, step: int, version: int) -> Rollouts | None:
        if self.source.should_stop():
            return None
        try:
            return self.source.collect(step, version, self._status)
        except Preempted:
            return None

    def distribute_groups(self, groups: list[Group] | None) -> Batch:
        """Advantages, schedule, and this replica's share of it, packed. Raises Preempted on every rank."""
        return self._distribute(lambda groups: policy.rl_sequences(groups, self.config.algorithm), groups)

    def measure(self, batch: Batch) -> Signals:
        """Log-probs and entropy of the whole batch under the policy at the start of the step."""
        with self._timed("measure", "measuring"):
            signals = self.engine.measure(batch.microbatches)
            gap = policy.sampler_gap(batch.microbatches, signals)
            total, worst = gap[:1].clone(), gap[1:].clone()
            dist.all_reduce(total, group=self.parallel.dp_cp_group)
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.parallel.dp_cp_group)
            self._gap = {
                "sampler_gap/mean": total.item() / max(signals.tokens, 1),
                "sampler_gap/max": worst.item(),
            }
        return signals

    def decide(self, signals: Signals) -> GateDecision | None:
        """STARE's decision for this step; None where STARE is off."""
        return self.stare.decide(signals) if self.stare else None

    def learn(self, batch: Batch, signals: Signals, decision: GateDecision | None) -> UpdateStats:
        """The step's optimizer updates."""
        with self._timed("learn", "learning"):
            microbatches, group = batch.microbatches, self.parallel.dp_cp_group
            targets = policy.Targets.plain(signals.log_probs)
            if self.stare:
                targets.weights, self._quadrants = self.stare.weigh(microbatches, signals, decision, group)
                targets.advantage_factor = decision.advantage_factor
            if self.config.algorithm.entropy_control != "none":
                targets.terms = policy.control_terms(
                    self.config, microbatches, signals, self.steps_done, group
                )
            if self.engine.reference:
                targets.reference = self.engine.measure_reference(microbatches)
            return self._update(
                batch,
                lambda part: policy.rl_loss(self.config, microbatches[part], targets, start=part.start),
            )

    def finish_step(self, step, groups, signals: Signals, decision, stats: UpdateStats) -> None:
        """Report the step, and evaluate where the config asks for it."""
        evaluated = self._evaluate_if_due(step)
        if not self.reporter:
            return
        metrics = group_metrics(groups) | self._sampling | self._gap
        metrics |= _learning_metrics(stats, signals.tokens)
        metrics["entropy"] = signals.mean_entropy
        if decision:
            metrics |= decision.metrics() | self._quadrants
        self._report(step, metrics | (evaluated or {}), signals.tokens)

    def _evaluate_if_due(self, step: int) -> dict[str, float] | None:
        last = step + 1 == self.config.run.steps
        evaluation = self.config.evaluation
        if not ((evaluation.every and (step + 1) % evaluation.every == 0) or (last and evaluation.at_end)):
            return None
        with self._timed("evaluate"):
            return self._serving.ask(self.source and partial(self._evaluate, step))

    def _evaluate(self, step: int, version: int) -> dict[str, float] | None:
        # Asked to stop meanwhile: all ranks learn of it together, at the next step's start.
        with contextlib.suppress(Preempted):
            return self.source.evaluate(step, version, self._status)
        return None

    # --- supervised training --------------------------------------------------------------------------

    def next_rows(self):
        """The step's rows, on rank 0. None elsewhere, or when the run is asked to stop."""
        return self.source.next() if self.source and not self.source.should_stop() else None

    def distribute_rows(self, rows) -> Batch:
        """This replica's share of supervised rows, packed. Raises Preempted on every rank."""
        return self._distribute(policy.sft_sequences, rows)

    def learn_supervised(self, batch: Batch) -> UpdateStats:
        """One optimizer update on the rows' cross-entropy."""
        with self._timed("learn", "learning"):
            return self._update(batch, lambda _part: policy.supervised_loss)

    def finish_supervised_step(self, step: int, batch: Batch, stats: UpdateStats) -> None:
        """Report the step."""
        if self.reporter:
            tokens = int(sum(batch.normalizers))
            metrics = _learning_metrics(stats, tokens)
            metrics["entropy"] = metrics.pop("policy/entropy")
            self._report(step, metrics, tokens)

    # --- state ----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the last step boundary, unless it is there, and wait for it; collective.

        Raises TrainingFailed where that is not possible: nobody is to think that it is there.
        """
        self._status("saving")
        if problem := self.keeping.save(self._boundary, wait=True):
            raise TrainingFailed(f"no checkpoint after {self.steps_done} steps: {problem}")

    def export(self) -> None:
        """Write the policy as the Hugging Face checkpoint RUN/hf; collective."""
        self._status("exporting")
        self.keeping.export(self.files.hf, self.steps_done, self._last_metrics)

    def close(self, outcome: str) -> None:
        """End what rank 0 holds: reward pool, client, weight-sync group, report."""
        for part in (self.source, self.publisher):
            if part:
                part.close()
        if self.reporter:
            self.reporter.close(outcome)

    def _keep(self) -> None:
        """What is written between two steps: checkpoints and exports that are due, collective."""
        self.keeping.poll()
        checkpoint = self.config.checkpoint
        if checkpoint.every and self.steps_done % checkpoint.every == 0:
            self._status("saving")
            self.keeping.save(self._boundary, wait=not checkpoint.background)
        if checkpoint.hf_every and self.steps_done % checkpoint.hf_every == 0:
            self._status("exporting")
            directory = self.files.hf_step(self.steps_done)
            self.keeping.export(directory, self.steps_done, self._last_metrics)

    def _state(self) -> RunState:
        """What the next step depends on beside weights and optimizer, taken between two steps."""
        return RunState(
            steps=self.steps_done,
            skipped=self._skipped,
            stare=self.stare.state_dict() if self.stare else None,
            source=self.source.state_dict() if self.source else None,
            bound=self._bound,
        )

    @property
    def _normalization(self) -> str:
        return self.config.algorithm.normalization if self.config.objective == "rl" else "token_mean"

    # --- helpers --------------------------------------------------------------------------------------

    def _distribute(self, to_sequences: Callable, data) -> Batch:
        shares = None
        if self.parallel.rank == 0:
            shares = [None] * self.parallel.dp_size
            if data is not None:
                shares = policy.share_out(
                    to_sequences(data),
                    replicas=self.parallel.dp_size,
                    updates=self.config.batch.updates_per_step,
                    max_tokens=self.config.batch.max_tokens_per_microbatch,
                    multiple=self.parallel.microbatch_multiple,
                    length_of=self.parallel.context.padded,
                    attention_length=self.engine.attention_length,
                    normalization=self._normalization,
                    max_response_tokens=self.config.rollout.max_response_tokens,
                )
        share = self.parallel.scatter_to_replicas(shares)
        if share is None:
            raise Preempted
        return Batch(self.engine, share)

    def _update(self, batch: Batch, loss_of: Callable[[slice], Any]) -> UpdateStats:
        updates = []
        for i, part in enumerate(batch.slices):
            number = self.steps_done * len(batch.slices) + i
            update = self.engine.learn(
                batch.microbatches[part],
                loss_of(part),
                normalizer=batch.normalizers[i],
                lr=self.engine.learning_rate(number),
            )
            updates.append(update)
            self._count_skipped(update)
        return merge_updates(updates, batch.normalizers)

    def _count_skipped(self, update: UpdateStats) -> None:
        self._skipped = self._skipped + 1 if update.skipped else 0
        if not update.skipped:
            return
        found = f"step {self.steps_done}: gradient norm {update.grad_norm:g}"
        self._on_problem(f"{found}; the update was skipped ({self._skipped} in a row)")
        if self._skipped >= self.config.optimizer.max_skipped:
            raise TrainingFailed(
                f"{found}; {self._skipped} updates in a row were skipped (optimizer.max_skipped). Look at "
                "metrics.jsonl before it, then resume from an earlier checkpoint with a lower optimizer.lr"
            )

    def _report(self, step: int, metrics: dict[str, float], tokens: int) -> None:
        updates = self.config.batch.updates_per_step
        metrics["lr"] = self.engine.learning_rate(step * updates)
        metrics |= {f"time/{name}": seconds for name, seconds in self._times.items()}
        metrics["tokens"] = tokens
        self.reporter.step(step, metrics)
        self._last_metrics = metrics

    def _status(self, phase: str) -> None:
        if self.reporter:
            self.reporter.status(phase)
        if self._pulse:
            self._pulse.phase(phase)

    @contextlib.contextmanager
    def _timed(self, name: str, phase: str | None = None):
        if phase:
            self._status(phase)
        start = time.perf_counter()
        yield
        self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - start


def _learning_metrics(stats: UpdateStats, tokens: int) -> dict[str, float]:
    means = {f"policy/{name}": total / max(tokens, 1) for name, total in stats.sums.items()}
    figures = {"loss": stats.loss, "grad_norm": stats.grad_norm, **means}
    return figures | ({"skipped_updates": stats.skipped} if stats.skipped else {})
