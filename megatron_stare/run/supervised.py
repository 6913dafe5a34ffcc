"""Rank 0's side of supervised training: rows of the task as prompt and response ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.tasks import PromptCursor, encode_response, open_source


class RowFeed:
    """Serves `prompts_per_step` rows a step; a row's answer is the response to learn."""

    def __init__(self, config: Config, tokenizer, should_stop: Callable[[], bool]):
        self.tokenizer, self.should_stop = tokenizer, should_stop
        self.rows = config.batch.prompts_per_step
        source = open_source(config.task, tokenizer, config.run.seed)
        self.cursor = PromptCursor(source, config.run.seed, config.task.shuffle)

    def next(self) -> list[tuple[list[int], list[int]]]:
        """The next step's rows as (prompt ids, response ids with the end-of-sequence token)."""
        return [
            (prompt.token_ids, encode_response(self.tokenizer, prompt, prompt.answer))
            for prompt in self.cursor.next(self.rows)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Where the next step's rows start."""
        return {"cursor": self.cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises UserError for a changed dataset."""
        self.cursor.load_state_dict(state["cursor"])

    def close(self) -> None:
        """Nothing to end."""
