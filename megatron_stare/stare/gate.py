"""When STARE reweights, and how strongly: feedback from the policy's entropy (arXiv 2606.19236).

H is the mean full-vocabulary entropy, in nats, of the tokens of the global
batch under the policy at the start of the step.

The *mode* decides whether reweighting is on in a step; the *schedule* moves W
and M from step to step. The two are independent: a schedule goes on moving
while the gate is closed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from megatron_stare.stare.reweight import ReweightRule

_MODES = ("target", "off")
_SCHEDULES = ("fixed", "sign", "pi")


@dataclass(frozen=True)
class GateConfig:
    """Settings of an `EntropyGate`. Defaults are the paper's.

    Args:
        mode: "target": reweight in steps with H < target_entropy; "off": in every step.
        schedule: "fixed": W and M are the rule's.
            "sign" (the paper's adaptive weights): W and M start as the rule's and move by
            alpha a step, apart while H is below target, together while it is above.
            "pi" (ours): with the relative error e = 1 - Hs / target_entropy of the smoothed
            entropy Hs, u = kp * e + ki * (sum of e), W = exp(u), M = exp(-u); the rule's own
            W and M are not used. It reaches W = 1 by itself where no push is needed, so it
            is meant for mode "off".
        rule: "o1" leaves M at 1 whatever the schedule; rules without W and M need "fixed".
        target_entropy: nats, above 0.
        alpha: step of "sign".
        W_max, M_min: clips of "sign" and "pi"; "pi" keeps u in [0, ln W_max].
        kp, ki: gains of "pi", per relative error, and per relative error and step.
        smoothing: weight of the old value in Hs, in [0, 1).

    Raises:
        ValueError: a value out of range, by name.
    """

    mode: Literal["target", "off"] = "target"
    schedule: Literal["fixed", "sign", "pi"] = "fixed"
    rule: ReweightRule = field(default_factory=ReweightRule.o1)
    target_entropy: float = 0.3
    alpha: float = 0.01
    W_max: float = 1.5
    M_min: float = 0.5
    kp: float = 4.0
    ki: float = 0.5
    smoothing: float = 0.7

    def __post_init__(self) -> None:
        _require(self.mode in _MODES, f"mode={self.mode!r} is none of {', '.join(_MODES)}")
        known = ", ".join(_SCHEDULES)
        _require(self.schedule in _SCHEDULES, f"schedule={self.schedule!r} is none of {known}")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, (int, float)):
                _require(math.isfinite(value), f"{entry.name}={value} is not finite")
        _require(self.target_entropy > 0, f"target_entropy={self.target_entropy} is not above 0")
        _require(self.alpha >= 0, f"alpha={self.alpha} is negative")
        _require(self.W_max >= 1, f"W_max={self.W_max} is below 1")
        _require(0 < self.M_min <= 1, f"M_min={self.M_min} is not in (0, 1]")
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


@dataclass(frozen=True)
class GateDecision:
    """What the gate says about one step.

    `rule` is None where reweighting would change nothing: the gate is closed, or
    every weight is 1. The step is then plain GRPO, bit for bit.
    """

    rule: ReweightRule | None
    open: bool
    W: float
    M: float
    entropy: float  # as given, also NaN
    smoothed_entropy: float  # NaN until a finite entropy was seen
    target_entropy: float
    nonfinite: int  # how many NaN or infinite entropies so far

    def metrics(self) -> dict[str, float]:
        """Figures for the log; all finite."""
        figures = {
            "stare/open": float(self.open),
            "stare/W": self.W,
            "stare/M": self.M,
            "stare/target_entropy": self.target_entropy,
            "stare/smoothed_entropy": self.smoothed_entropy,
            "stare/nonfinite_entropy": float(self.nonfinite),
        }
        return {name: value for name, value in figures.items() if math.isfinite(value)}


class EntropyGate:
    """Holds entropy at a target: `update` once a step, before the weights of that step are computed.

    Deterministic in the sequence of entropies, so ranks that are given the same
    entropy stay in step without talking to each other.
    """

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        rule = config.rule
        self._W = rule.high_positive if config.schedule != "pi" else 1.0
        self._M = rule.high_negative if config.schedule != "pi" else 1.0
        self._open = config.mode == "off"
        self._integral = 0.0
        self._smoothed = 0.0  # meaningless until _finite > 0
        self._finite = 0
        self._nonfinite = 0

    def update(self, entropy: float) -> GateDecision:
        """Take H of this step, move W and M, and decide.

        W and M move before they are used, by the entropy of the same step, as in the
        published code. A NaN or infinite H changes nothing: the last decision stands
        (before the first finite one: closed, or open for mode "off"), and it is counted.
        """
        entropy = float(entropy)
        if math.isfinite(entropy):
            self._advance(entropy)
        else:
            self._nonfinite += 1
        return self._decision(entropy)

    def state_dict(self) -> dict[str, float | int]:
        """Everything that later decisions depend on, as plain numbers."""
        return {name: kind(getattr(self, f"_{name}")) for name, kind in _STATE.items()}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Continue from `state_dict()`. ValueError names missing and unknown entries.

        A fixed schedule keeps the W and M of its own config.
        """
        missing, unknown = sorted(_STATE.keys() - state.keys()), sorted(state.keys() - _STATE.keys())
        if missing or unknown:
            raise ValueError(f"not a state of this gate: missing {missing}, unknown {unknown}")
        for name, kind in _STATE.items():
            if name in ("W", "M") and self.config.schedule == "fixed":
                continue
            setattr(self, f"_{name}", kind(state[name]))

    def _advance(self, entropy: float) -> None:
        config = self.config
        old = config.smoothing if self._finite else 0.0
        self._smoothed = old * self._smoothed + (1 - old) * entropy
        self._finite += 1
        if config.schedule == "sign":
            self._step_sign(entropy)
        elif config.schedule == "pi":
            self._step_pi()
        self._open = config.mode == "off" or entropy < config.target_entropy

    def _step_sign(self, entropy: float) -> None:
        config = self.config
        error = config.target_entropy - entropy
        step = math.copysign(config.alpha, error) if error != 0 else 0.0
        self._W = min(max(self._W + step, 1.0), config.W_max)
        self._M = min(max(self._M - step, config.M_min), 1.0)

    def _step_pi(self) -> None:
        config = self.config
        limit = math.log(config.W_max)
        error = (config.target_entropy - self._smoothed) / config.target_entropy
        wanted = config.kp * error + self._integral
        # Anti-windup: while the output is clipped, an error that would push it further
        # out is not collected, else it takes as long to come back as it took to get there.
        if not ((wanted > limit and error > 0) or (wanted < 0 and error < 0)):
            self._integral = min(max(self._integral + config.ki * error, 0.0), limit)
        u = min(max(config.kp * error + self._integral, 0.0), limit)
        self._W = math.exp(u)
        self._M = max(config.M_min, math.exp(-u))

    def _decision(self, entropy: float) -> GateDecision:
        rule = self.config.rule
        if self.config.schedule != "fixed":
            rule = rule.with_strength(self._W, self._M)
        return GateDecision(
            rule=rule if self._open and not rule.is_identity else None,
            open=bool(self._open),
            W=rule.high_positive,
            M=rule.high_negative,
            entropy=entropy,
            smoothed_entropy=self._smoothed if self._finite else math.nan,
            target_entropy=self.config.target_entropy,
            nonfinite=self._nonfinite,
        )


_STATE: dict[str, type] = {
    "W": float,
    "M": float,
    "open": int,
    "integral": float,
    "smoothed": float,
    "finite": int,
    "nonfinite": int,
}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
