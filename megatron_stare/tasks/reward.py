"""Scoring: fills the rewards of sampled groups, whatever the reward function does."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from megatron_stare.tasks.reward_pool import RewardPool
from megatron_stare.tasks.rewards import RewardCall, make_reward
from megatron_stare.tasks.sample import Group

if TYPE_CHECKING:
    from megatron_stare.config.schema import TaskSection

log = logging.getLogger(__name__)

_MESSAGES = 5


@dataclass
class RewardStats:
    """What happened while a batch was scored.

    Attributes:
        count: responses scored.
        errors: those whose reward raised, timed out, crashed or was no finite number; their reward is 0.
        timeouts: those of the errors that took longer than task.reward_timeout.
        messages: the most frequent different error messages, with how often each came.
        seconds: wall-clock time.
    """

    count: int = 0
    errors: int = 0
    timeouts: int = 0
    messages: list[tuple[str, int]] = field(default_factory=list)
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Named for the reporter."""
        return {
            "reward/errors": float(self.errors),
            "reward/timeouts": float(self.timeouts),
            "time/score": self.seconds,
        }


def check_reward(task: TaskSection) -> None:
    """Load the reward in this process, to find mistakes before a run starts anything.

    Raises:
        UserError: as `make_reward`.
    """
    make_reward(task.reward, task.source, task.source_args)


class Scorer:
    """Scores groups in worker processes. Safe to use from any thread; also a context manager.

    Args:
        task: the `task` section.
        log_file: receives what reward functions print; None: standard error.

    Raises:
        UserError: the reward cannot be loaded.
    """

    def __init__(self, task: TaskSection, log_file: Path | None = None) -> None:
        reward = {"name": task.reward, "source": task.source, "source_args": task.source_args}
        self._closing = threading.Event()
        # One thread owns the workers for as long as they live, whichever thread scores: the kernel ends a
        # worker with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")

        def start() -> RewardPool:
            pool = RewardPool(reward, task.reward_workers, task.reward_timeout, log_file)
            pool.wait_ready()
            return pool

        try:
            self._pool = self._thread.submit(start).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def score(self, groups: Sequence[Group]) -> RewardStats:
        """Set reward and reward_error of every response in the groups.

        A reward that fails in any way costs its own response only: reward 0.0 and the reason in reward_error.
        """
        started = time.monotonic()
        responses = [response for group in groups for response in group.responses]
        calls = [
            RewardCall(
                response.text,
                group.prompt.answer,
                group.prompt.text,
                group.prompt.data_source,
                group.prompt.extra,
                group.prompt.index,
                response.finish_reason,
            )
            for group in groups
            for response in group.responses
        ]
        outcomes = self._thread.submit(self._pool.run, calls, self._closing.is_set).result()
        for response, outcome in zip(responses, outcomes, strict=True):
            response.reward, response.reward_error = outcome.reward, outcome.error
        messages = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
        stats = RewardStats(
            count=len(outcomes),
            errors=messages.total(),
            timeouts=sum(outcome.timed_out for outcome in outcomes),
            messages=messages.most_common(_MESSAGES),
            seconds=time.monotonic() - started,
        )
        if stats.errors:
            reasons = "; ".join(f"{text} ({times}x)" for text, times in stats.messages)
            log.warning("%d of %d rewards failed and count as 0: %s", stats.errors, stats.count, reasons)
        return stats

    def close(self) -> None:
        """End every worker. A score() under way in another thread returns with what is done."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.submit(self._pool.close).result()
        self._thread.shutdown()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
