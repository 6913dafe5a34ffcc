"""In which order prompts are drawn, so that a resumed run draws the same ones."""

from __future__ import annotations

import random
from typing import Any

from megatron_stare.errors import UserError
from megatron_stare.tasks.data import PromptSource
from megatron_stare.tasks.sample import Prompt


class PromptCursor:
    """Draws prompts epoch by epoch, each epoch a permutation of all rows that follows from (seed, epoch).

    Rows dropped as too long are passed over. A draw may span epochs.

    Args:
        source: the prompts.
        seed: names the permutations; independent of every other random number of the run.
        shuffle: False draws rows in their order, in every epoch.
    """

    def __init__(self, source: PromptSource, seed: int, shuffle: bool = True) -> None:
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._start_epoch(0)

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._epoch

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts.

        Raises:
            UserError: a whole epoch holds no prompt that is short enough.
        """
        prompts: list[Prompt] = []
        passed_over = 0
        while len(prompts) < n:
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1)
                self._position = 0
            prompt = self._source.get(self._order[self._position])
            self._position += 1
            if prompt is not None:
                prompts.append(prompt)
                passed_over = 0
            elif (passed_over := passed_over + 1) >= len(self._order):
                raise UserError(f"none of the {len(self._order)} prompts fits in task.max_prompt_tokens")
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Position, order and identity of the data; plain JSON values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self._source),
            "fingerprint": self._source.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            UserError: the data or its order is another one, so that prompts would be skipped or repeated.
        """
        mine = self.state_dict()
        if state["rows"] != mine["rows"]:
            raise UserError(
                f"the dataset has {mine['rows']} rows, but {state['rows']} when the checkpoint was saved; "
                "give the same data, or start a new run"
            )
        if state["fingerprint"] != mine["fingerprint"]:
            raise UserError(
                "the dataset's content is not what it was when the checkpoint was saved; "
                "give the same data, or start a new run"
            )
        for key in ("seed", "shuffle"):
            if state[key] != mine[key]:
                raise UserError(
                    f"prompts are drawn with {key}={mine[key]}, but the checkpoint with {key}={state[key]}; "
                    "give the same value, or start a new run"
                )
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        rows = range(len(self._source))
        if not self._shuffle:
            self._order = list(rows)
            return
        # Sorted by random(), whose sequence alone is promised to stay the same in later versions; those of
        # shuffle() and of NumPy's and PyTorch's generators are not, and a run may outlive an upgrade.
        rng = random.Random(f"prompt order/{self._seed}/{epoch}")
        keys = [rng.random() for _ in rows]
        self._order = sorted(rows, key=keys.__getitem__)
