"""Settings of the entropy gate, and what of them cannot be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from megatron_stare.stare.reweight import ReweightRule
from megatron_stare.stare.schedule import Band

MODES = ("target", "intensity", "band", "off")
SCHEDULES = ("fixed", "sign", "pi")

# A band that is not given lies around the target like [0.2, 0.5] around the paper's 0.3.
_BELOW_TARGET, _ABOVE_TARGET = 2 / 3, 5 / 3


@dataclass(frozen=True)
class GateConfig:
    """Settings of an `EntropyGate`. Defaults are the paper's.

    Args:
        mode: when tokens are reweighted, and how strongly (lambda: w' = 1 + lambda (w - 1)).
            "target": lambda is 1 in steps with H < target_entropy, else 0.
            "intensity": lambda rises smoothly from 0 at H >= H_max to 1 at H <= H_min.
            "band": a factor g on all advantages, 1 in [H_min, H_max], falling smoothly to
            g_min over `ramp` nats below it and rising smoothly to g_max over `ramp` nats
            above. Tokens are reweighted below the band only, and lambda rises with the same
            ramp, so a step with g = 1 is plain GRPO.
            "off": no gate; lambda is 1 in every step.
        schedule: "fixed": W and M are the rule's.
            "sign" (the paper's adaptive weights): W and M start as the rule's and move by
            alpha a step, apart while H is below target, together while it is above.
            "pi" (ours): with the relative error e = 1 - Hs / target_entropy of the smoothed
            entropy Hs, u = kp * e + ki * (sum of e), W = exp(u), M = exp(-u); the rule's own
            W and M are not used. It reaches W = 1 by itself where no push is needed, so it
            is meant for mode "off".
        rule: "o1" leaves M at 1 whatever the schedule; rules without W and M need "fixed".
        target_entropy: nats, above 0; or "auto": `auto_fraction` of the mean entropy of the
            first `auto_steps` steps. Until it is known no token is reweighted, g is 1 and
            the schedule does not move.
        alpha: step of "sign".
        W_max, M_min: clips of "sign" and "pi"; "pi" keeps u in [ln W_min, ln W_max].
        W_min: in (0, 1]; only used by "pi". Below 1 the schedule also lowers an entropy that is
            above the target (W < 1 < M), which GRPO alone does slowly once rewards are high.
        kp, ki: gains of "pi", per relative error, and per relative error and step.
        smoothing: weight of the old value in Hs, in [0, 1).
        H_min, H_max: nats, the band of "intensity" and "band"; both or neither. None: 2/3
            and 5/3 of the target entropy.
        g_min, g_max: in (0, 1] and at least 1; only used by "band".
        ramp: nats over which g changes, on either side, at most H_min; only used by "band".
            None: half the width of the band, or H_min if that is less.
        auto_steps, auto_fraction: at least 1, in (0, 1]; only used by target_entropy "auto".

    Raises:
        ValueError: a value out of range or a combination that cannot work, by name.
    """

    mode: Literal["target", "intensity", "band", "off"] = "target"
    schedule: Literal["fixed", "sign", "pi"] = "fixed"
    rule: ReweightRule = field(default_factory=ReweightRule.o1)
    target_entropy: float | Literal["auto"] = 0.3
    alpha: float = 0.01
    W_max: float = 1.5
    M_min: float = 0.5
    W_min: float = 1.0
    kp: float = 4.0
    ki: float = 0.5
    smoothing: float = 0.7
    H_min: float | None = None
    H_max: float | None = None
    g_min: float = 0.5
    g_max: float = 1.2
    ramp: float | None = None
    auto_steps: int = 10
    auto_fraction: float = 0.5

    def __post_init__(self) -> None:
        _require(self.mode in MODES, f"mode={self.mode!r} is none of {', '.join(MODES)}")
        known = ", ".join(SCHEDULES)
        _require(self.schedule in SCHEDULES, f"schedule={self.schedule!r} is none of {known}")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, (int, float)):
                _require(math.isfinite(value), f"{entry.name}={value} is not finite")
        self._check_target()
        self._check_band()
        self._check_schedule()

    @property
    def is_auto(self) -> bool:
        """Is the target measured rather than given?"""
        return self.target_entropy == "auto"

    @property
    def has_band(self) -> bool:
        """Does the mode look at an interval rather than at the target?"""
        return self.mode in ("intensity", "band")

    def band(self, target: float) -> Band:
        """The interval and its ramps, for a target entropy in nats."""
        H_min = _BELOW_TARGET * target if self.H_min is None else self.H_min
        H_max = _ABOVE_TARGET * target if self.H_max is None else self.H_max
        ramp = min((H_max - H_min) / 2, H_min) if self.ramp is None else self.ramp
        return Band(H_min, H_max, ramp)

    def _check_target(self) -> None:
        target = self.target_entropy
        if not self.is_auto:
            _require(
                isinstance(target, (int, float)), f"target_entropy={target!r} is neither a number nor 'auto'"
            )
            _require(target > 0, f"target_entropy={target} is not above 0")
            return
        _require(
            isinstance(self.auto_steps, int) and self.auto_steps >= 1,
            f"auto_steps={self.auto_steps} is not a whole number of at least 1",
        )
        _require(0 < self.auto_fraction <= 1, f"auto_fraction={self.auto_fraction} is not in (0, 1]")
        own_band = self.has_band and self.H_min is not None
        _require(
            self.schedule != "fixed" or not (self.mode == "off" or own_band),
            f"target_entropy='auto' would be used by nothing: mode={self.mode!r}"
            f"{' with its own H_min and H_max' if own_band else ''}, schedule='fixed'",
        )

    def _check_band(self) -> None:
        _require(
            (self.H_min is None) == (self.H_max is None),
            f"H_min={self.H_min}, H_max={self.H_max}: give both or neither",
        )
        if self.H_min is not None and self.H_max is not None:
            bounds = f"H_min={self.H_min}, H_max={self.H_max}"
            _require(0 < self.H_min < self.H_max, f"{bounds}: 0 < H_min < H_max is needed")
        _require(0 < self.g_min <= 1, f"g_min={self.g_min} is not in (0, 1]")
        _require(self.g_max >= 1, f"g_max={self.g_max} is below 1")
        if self.ramp is None:
            return
        _require(self.ramp > 0, f"ramp={self.ramp} is not above 0")
        if self.mode == "band":
            known = self.H_min is not None or not self.is_auto
            _require(known, f"ramp={self.ramp} needs an H_min in nats too")
            H_min = self.band(0.0 if self.is_auto else self.target_entropy).H_min
            _require(
                self.ramp <= H_min, f"ramp={self.ramp} is above H_min={H_min:g}: g_min could not be reached"
            )

    def _check_schedule(self) -> None:
        _require(self.alpha >= 0, f"alpha={self.alpha} is negative")
        _require(self.W_max >= 1, f"W_max={self.W_max} is below 1")
        _require(0 < self.M_min <= 1, f"M_min={self.M_min} is not in (0, 1]")
        _require(0 < self.W_min <= 1, f"W_min={self.W_min} is not in (0, 1]")
        _require(self.kp >= 0 and self.ki >= 0, f"kp={self.kp}, ki={self.ki}: gains must not be negative")
        _require(0 <= self.smoothing < 1, f"smoothing={self.smoothing} is not in [0, 1)")
        if self.schedule == "fixed":
            return
        rule = self.rule
        rule.with_strength(rule.high_positive, rule.high_negative)  # refuses rules that have no W and M
        if self.schedule == "pi":
            _require(self.kp + self.ki > 0, "kp=0, ki=0: schedule 'pi' would never move")
        else:
            W, M = rule.high_positive, rule.high_negative
            _require(1 <= W <= self.W_max, f"the rule's W={W} is not in [1, W_max={self.W_max}]")
            _require(self.M_min <= M <= 1, f"the rule's M={M} is not in [M_min={self.M_min}, 1]")
        if not self.is_auto:
            self.check_reach(float(self.target_entropy))
        elif self.H_min is None:
            self.check_reach(1.0)  # the band moves with the target, so any will tell

    def check_reach(self, target: float) -> None:
        """ValueError where the schedule steers to a target (nats) at which the mode applies no weights."""
        if not self.has_band or self.schedule == "fixed":
            return
        edge = "H_max" if self.mode == "intensity" else "H_min"
        limit = getattr(self.band(target), edge)
        own = self.H_min is not None
        where = f"{edge}={limit:.3g}" if own else f"{edge}, {limit / target:.3g} of the target"
        _require(
            target < limit,
            f"schedule={self.schedule!r} cannot hold target_entropy={self.target_entropy}"
            f"{f' ({target:.3g})' if self.is_auto and own else ''}: mode={self.mode!r} "
            f"reweights only below {where}; give H_min and H_max, with the target below",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
