"""The servers as all ranks see them: the policy's weights on each, and their answers, whatever restarts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron_stare.config.schema import RolloutSection
from megatron_stare.engine.engine import Engine
from megatron_stare.quant.wire import fp8_weights
from megatron_stare.rollout import Publisher, PublishError, StaleServersError

T = TypeVar("T")
_ATTEMPTS = 4  # each leaves out the servers that were found dead in the one before


class Serving:
    """Publishes and asks; every method is collective. `publisher` exists on rank 0 only.

    Args:
        version: of the weights that were published last; the next publish is one more.
        on_problem: told what failed and was tried again.
    """

    def __init__(
        self,
        rollout: RolloutSection,
        engine: Engine,
        publisher: Publisher | None,
        version: int,
        on_problem: Callable[[str], None],
    ) -> None:
        self._rollout, self._engine, self._publisher = rollout, engine, publisher
        self._on_problem = on_problem
        self.version = version

    def publish_next(self) -> None:
        """Give the servers the current weights, as the next version."""
        self.version += 1
        self._publish()

    def ask(self, question: Callable[[int], T] | None) -> T | None:
        """The answer of rank 0's `question`, which gets the weights' version; None on other ranks.

        Servers that come back without the current weights get them first, and then all is asked again.
        """
        while True:
            answer, stale = None, False
            if question is not None:
                try:
                    answer = question(self.version)
                except StaleServersError as error:
                    stale = True
                    self._on_problem(f"{error}; publishing version {self.version} again")
            if not self._engine.parallel.agree_on(stale):
                return answer
            self._publish()

    def _publish(self) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            problem = self._engine.parallel.agree_on(self._publish_once())
            if problem is None:
                return
            if self._publisher and attempt < _ATTEMPTS:
                self._on_problem(f"{problem}; trying again")
        raise PublishError(problem)

    def _publish_once(self) -> str | None:
        weights = self._engine.hf_weights()
        if self._rollout.wire == "fp8_blockwise":
            weights = fp8_weights(weights, self._engine.hf)
        if self._publisher is None:
            for _ in weights:  # takes part in gathering; the tensors are whole on rank 0 alone
                pass
            return None
        try:
            self._publisher.publish(weights, self.version)
        except PublishError as error:
            return str(error)
        return None
