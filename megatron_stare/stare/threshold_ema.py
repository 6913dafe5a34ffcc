"""Thresholds smoothed over steps, for batches so small that a step's own quantile is mostly noise.

The quantile of n tokens has a standard error of sqrt(P (1 - P) / n) / density: with
few tokens the selection jumps from step to step although the policy hardly moved.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_stare.stare.reweight import Thresholds


class ThresholdEMA:
    """Exponential moving average of each pool's threshold: smoothed = decay * old + (1 - decay) * new.

    What changes against a step's own quantile:

    - The number of tokens above the threshold is no longer exactly k but varies around
      it, and while surprisal drifts it lags by about decay / (1 - decay) steps.
    - Places are not shared: a token exactly at the smoothed threshold is fully high.
      Only where the smoothed value is the step's own to the bit (the first step, or
      decay 0) are ties shared as usual.
    - A pool that is empty in a step, or whose quantile is infinite, keeps its old
      threshold; before it had one, the step's own stands.

    Deterministic, and without communication: thresholds are equal on all ranks, so
    their averages are. Nothing waits for the device but `state_dict`.

    Args:
        decay: weight of the old value, in [0, 1). 0: the step's own thresholds.

    Raises:
        ValueError: decay out of range.
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"threshold_ema={decay} is not in [0, 1)")
        self.decay = decay
        self._kind: tuple[str, float] | None = None  # pool and top_fraction of what was seen
        self._value: Tensor | None = None  # [S] float64, +inf where no threshold was seen yet

    def update(self, thresholds: Thresholds) -> Thresholds:
        """Take this step's thresholds; what to give to `token_weights(thresholds=...)`. Once a step.

        `value` is smoothed; count, k, above and tied stay this step's own.

        Raises:
            ValueError: thresholds of another pool or top_fraction than before.
        """
        kind = (thresholds.pool, float(thresholds.top_fraction))
        if self._kind not in (None, kind):
            raise ValueError(
                f"thresholds are for pool={kind[0]!r}, top_fraction={kind[1]}; the average is of "
                f"pool={self._kind[0]!r}, top_fraction={self._kind[1]}"
            )
        new = thresholds.value.double()
        old = torch.full_like(new, torch.inf) if self._value is None else self._value.to(new.device)
        usable = (thresholds.k > 0) & new.isfinite()
        mixed = torch.where(old.isfinite(), self.decay * old + (1 - self.decay) * new, new)
        self._kind, self._value = kind, torch.where(usable, mixed, old)

        value = torch.where(self._value.isfinite(), self._value.float(), thresholds.value)
        own = value == thresholds.value
        return replace(thresholds, value=value, at_value=torch.where(own, thresholds.tie_share(), 1.0))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: pool, top_fraction and value (a list, None where a pool had no threshold yet)."""
        if self._kind is None or self._value is None:
            return {"pool": None, "top_fraction": None, "value": []}
        value = [v if math.isfinite(v) else None for v in self._value.tolist()]
        return {"pool": self._kind[0], "top_fraction": self._kind[1], "value": value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, with the decay of this object.

        Raises:
            ValueError: missing or unknown entries, or a number of values that does not fit the pool.
        """
        known = {"pool", "top_fraction", "value"}
        missing, unknown = sorted(known - state.keys()), sorted(state.keys() - known)
        if missing or unknown:
            raise ValueError(f"not a state of a threshold average: missing {missing}, unknown {unknown}")
        pool, value = state["pool"], state["value"]
        if len(value) != {None: 0, "per_sign": 2, "all": 1}.get(pool):
            raise ValueError(f"not a state of a threshold average: pool={pool!r} with {len(value)} values")
        if pool is None:
            self._kind, self._value = None, None
            return
        self._kind = (pool, float(state["top_fraction"]))
        numbers = [math.inf if v is None else float(v) for v in value]
        self._value = torch.tensor(numbers, dtype=torch.float64)
