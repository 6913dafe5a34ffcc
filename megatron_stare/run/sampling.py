"""Rank 0's side of a step: prompts to the servers, responses to the rewards, and evaluation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.rollout import RolloutClient, StaleServersError
from megatron_stare.rollout.request import seed_named
from megatron_stare.run.journal import Journal, Rollouts
from megatron_stare.tasks import PromptCursor, Scorer, fill_texts, open_source
from megatron_stare.tasks.sample import Group, Prompt


class Sampler:
    """Fills a step's batch with scored groups, and measures the policy on held-out prompts."""

    def __init__(
        self,
        config: Config,
        tokenizer,
        client: RolloutClient,
        should_stop: Callable[[], bool],
        reward_log: Path,
        journal: Journal | None,
    ):
        self.config, self.tokenizer, self.client = config, tokenizer, client
        self.should_stop = should_stop
        self.journal = journal
        source = open_source(config.task, tokenizer, config.run.seed)
        self.cursor = PromptCursor(source, config.run.seed, config.task.shuffle)
        self.scorer = Scorer(config.task, reward_log)

    def collect(self, step: int, weight_version: int, status: Callable[[str], None]) -> Rollouts:
        """A step's groups, each response scored, and what sampling cost: from the journal, or sampled.

        With dynamic sampling, groups whose rewards are all equal are replaced by new ones. After
        `max_sampling_rounds` the batch is filled up with some of them (they carry no advantage), so that
        a task that has become too easy slows the run down instead of ending it.

        Raises StaleServersError, with the prompts' cursor where it was.
        """
        kept = self.journal.read(step) if self.journal else None
        if kept is not None:
            self.load_state_dict(kept.source)
            fill_texts(self.tokenizer, kept.groups)
            return kept
        start = self.cursor.state_dict()
        try:
            groups, figures = self._fill_batch(step, weight_version, status)
        except StaleServersError:
            self.cursor.load_state_dict(start)
            raise
        rollouts = Rollouts(groups, figures, self.state_dict())
        if self.journal:
            self.journal.write(step, rollouts)
        return rollouts

    def _fill_batch(
        self, step: int, weight_version: int, status: Callable[[str], None]
    ) -> tuple[list[Group], dict[str, float]]:
        wanted, algorithm = self.config.batch.prompts_per_step, self.config.algorithm
        kept: list[Group] = []
        uniform: list[Group] = []
        totals: Counter[str] = Counter()
        rounds = 0
        while len(kept) < wanted and rounds < algorithm.max_sampling_rounds:
            rounds += 1
            groups, stats = self._sample_and_score(
                self.cursor.next(wanted - len(kept)),
                self.config.batch.responses_per_prompt,
                weight_version,
                status,
                self._seed("train", step, rounds),
            )
            totals.update(stats.metrics())
            for group in groups:
                drop = algorithm.dynamic_sampling and _is_uniform(group)
                (uniform if drop else kept).append(group)
        figures = {
            **totals,
            "sampling/rounds": rounds,
            "sampling/uniform_groups": len(uniform) + sum(map(_is_uniform, kept)),
        }
        return kept + uniform[: wanted - len(kept)], figures

    def evaluate(self, step: int, weight_version: int, status: Callable[[str], None]) -> dict[str, float]:
        """Mean reward, pass@k and distinct right answers a prompt, on the first held-out prompts.

        pass@k for the number of samples and for every power of four below it.
        """
        evaluation, task = self.config.evaluation, self.config.task
        if evaluation.source:
            task = task.model_copy(update={"source": evaluation.source})
        held_out = self.config.run.seed + 1  # another seed makes other rows of a procedural task
        source = open_source(task, self.tokenizer, held_out)
        prompts = PromptCursor(source, held_out, shuffle=False).next(evaluation.prompts)
        seed = self._seed("evaluation", step)
        groups, _ = self._sample_and_score(prompts, evaluation.samples, weight_version, status, seed)
        right = [[r for r in group.responses if r.reward > 0] for group in groups]
        n, count = evaluation.samples, len(groups)
        passed = {
            f"eval/pass@{k}": sum(pass_at_k(n, len(responses), k) for responses in right) / count
            for k in sorted({4**power for power in range(1, 7) if 4**power < n} | {n})
        }
        return {
            "eval/reward": sum(r.reward for g in groups for r in g.responses) / (count * n),
            **passed,
            "eval/distinct_right": sum(len({r.text for r in responses}) for responses in right) / count,
        }

    def _sample_and_score(self, prompts: list[Prompt], n: int, weight_version: int, status, seed: int | None):
        status("sampling")
        groups = self.client.generate(
            prompts, n, weight_version=weight_version, should_stop=self.should_stop, seed=seed
        )
        fill_texts(self.tokenizer, groups)
        status("scoring")
        return groups, self.scorer.score(groups)

    def _seed(self, *purpose: str | int) -> int | None:
        """62 bits that name this draw of this run; None where servers draw as they like."""
        if not self.config.rollout.seeded:
            return None
        return seed_named(self.config.run.seed, *purpose)

    def state_dict(self) -> dict[str, Any]:
        """Where the next step's prompts start."""
        return {"cursor": self.cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises UserError for a changed dataset."""
        self.cursor.load_state_dict(state["cursor"])

    def close(self) -> None:
        """End the reward pool and the client's thread."""
        self.scorer.close()
        self.client.close()


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that k of the samples, drawn without replacement, hold a right one.

    The unbiased estimate of arXiv 2107.03374, section 2.1; k is at most `samples`.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def _is_uniform(group: Group) -> bool:
    return len({response.reward for response in group.responses}) <= 1
