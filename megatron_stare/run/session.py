"""A run as one rank sees it: the parts, what they hand each other, and the state between steps."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_stare.config.schema import Config
from megatron_stare.engine.batch import Microbatch
from megatron_stare.engine.engine import Engine
from megatron_stare.engine.step import Signals, UpdateStats
from megatron_stare.errors import Preempted
from megatron_stare.quant.wire import fp8_weights
from megatron_stare.report import Reporter
from megatron_stare.run import policy
from megatron_stare.run.card import model_card
from megatron_stare.run.files import RunFiles
from megatron_stare.run.metrics import group_metrics, merge_updates
from megatron_stare.resume.mode import fixed_values
from megatron_stare.run.sampling import Sampler
from megatron_stare.run.stare import Stare
from megatron_stare.run.supervised import RowFeed
from megatron_stare.stare import GateDecision
from megatron_stare.tasks.sample import Group
from megatron_stare.weights.save import save_hf


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
    """The parts of a run on this rank. `source`, `publisher` and `reporter` exist on rank 0 only."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        files: RunFiles,
        *,
        source: Sampler | RowFeed | None,
        publisher,
        reporter: Reporter | None,
        first_step: int = 0,
        stare_state: dict[str, Any] | None = None,
    ):
        self.config, self.engine, self.files = config, engine, files
        self.parallel = engine.parallel
        self.source, self.publisher, self.reporter = source, publisher, reporter
        self.stare = Stare.of(config)
        if self.stare and stare_state:
            self.stare.load_state_dict(stare_state)
        self.steps_done = self._saved_at = first_step
        self._version = first_step - 1
        self._times: dict[str, float] = {}
        self._sampling: dict[str, float] = {}
        self._quadrants: dict[str, float] = {}
        self._last_metrics: dict[str, float] = {}
        self._boundary = self._run_state()

    def remaining_steps(self) -> Iterator[int]:
        """Steps still to do, counted from 0 over the whole run."""
        while self.steps_done < self.config.run.steps:
            self._times = {}
            yield self.steps_done
            self.steps_done += 1
            self._boundary = self._run_state()
            every = self.config.checkpoint.every
            if every and self.steps_done % every == 0:
                self.save()
            hf_every = self.config.checkpoint.hf_every
            if hf_every and self.steps_done % hf_every == 0:
                self.export(self.files.hf_step(self.steps_done))

    # --- the parts of an RL step, in the loop's order -------------------------------------------------

    def publish(self) -> None:
        """Give the servers the current weights; their version is the number of steps they have learned."""
        self._version += 1
        with self._timed("publish", "publishing"):
            weights = self.engine.hf_weights()
            if self.config.rollout.wire == "fp8_blockwise":
                weights = fp8_weights(weights, self.engine.hf)
            if self.publisher:
                self.publisher.publish(weights, self._version)
            else:
                for _ in weights:  # takes part in gathering; the tensors are whole on rank 0 alone
                    pass

    def sample(self, step: int) -> list[Group] | None:
        """The step's scored groups, on rank 0. None elsewhere, or when the run is asked to stop."""
        if self.source is None or self.source.should_stop():
            return None
        try:
            with self._timed("sample"):
                groups, self._sampling = self.source.collect(self._version, self._status)
            return groups
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
        last = step + 1 == self.config.run.steps
        evaluation = self.config.evaluation
        due = (evaluation.every and (step + 1) % evaluation.every == 0) or (last and evaluation.at_end)
        if not self.reporter:
            return
        metrics = group_metrics(groups) | self._sampling | self._gap
        metrics |= _learning_metrics(stats, signals.tokens)
        metrics["entropy"] = signals.mean_entropy
        if decision:
            metrics |= decision.metrics() | self._quadrants
        if due:
            # Asked to stop meanwhile: all ranks learn of it together, at the next step's start.
            with contextlib.suppress(Preempted), self._timed("evaluate"):
                metrics |= self.source.evaluate(self._version, self._status)
        self._report(step, metrics, signals.tokens)

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
        """Write a checkpoint of the last step boundary, unless that is there already; collective."""
        if self._saved_at == self.steps_done:
            return
        self._status("saving")
        checkpoint = self.config.checkpoint
        self.engine.save(
            self.files.checkpoints, self.steps_done, self._boundary, keep_last=checkpoint.keep_last
        )
        self._saved_at = self.steps_done

    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face checkpoint, in place of an earlier one; collective."""
        self._status("exporting")
        if self.parallel.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        save_hf(
            directory,
            self.engine.exporter,
            self.config.model.path,
            card=model_card(self.config, self.steps_done, self._last_metrics),
        )

    def close(self, outcome: str) -> None:
        """End what rank 0 holds: reward pool, client, weight-sync group, report."""
        for part in (self.source, self.publisher):
            if part:
                part.close()
        if self.reporter:
            self.reporter.close(outcome)

    def _run_state(self) -> dict[str, Any]:
        """What the next step depends on beside weights and optimizer, taken between two steps."""
        return {
            "steps": self.steps_done,
            "fixed": fixed_values(self.config),
            "stare": self.stare.state_dict() if self.stare else None,
            "source": self.source.state_dict() if self.source else None,
        }

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
            updates.append(
                self.engine.learn(
                    batch.microbatches[part],
                    loss_of(part),
                    normalizer=batch.normalizers[i],
                    lr=self.engine.learning_rate(number),
                )
            )
        return merge_updates(updates, batch.normalizers)

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

    @contextlib.contextmanager
    def _timed(self, name: str, phase: str | None = None):
        if phase:
            self._status(phase)
        start = time.perf_counter()
        yield
        self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - start


def _learning_metrics(stats: UpdateStats, tokens: int) -> dict[str, float]:
    means = {f"policy/{name}": total / max(tokens, 1) for name, total in stats.sums.items()}
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, **means}
