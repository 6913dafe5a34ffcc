"""When STARE reweights, and how strongly: feedback from the policy's entropy (arXiv 2606.19236).

H is the mean full-vocabulary entropy, in nats, of the tokens of the global
batch under the policy at the start of the step.

The *mode* decides how strongly the rule is applied in a step; the *schedule*
moves the rule's W and M from step to step. The two are independent: a schedule
goes on moving while the gate is closed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_stare.stare.gate_config import GateConfig
from megatron_stare.stare.reweight import ReweightRule
from megatron_stare.stare.schedule import pi_step, sign_step


@dataclass(frozen=True)
class GateDecision:
    """What the gate says about one step: a token's advantage is advantage_factor * w * A.

    `rule` gives w. It is None where reweighting would change nothing: the gate is
    closed, or every weight is 1. If `advantage_factor` is 1 as well (it always is
    but in mode "band"), the step is plain GRPO, bit for bit.
    """

    rule: ReweightRule | None
    open: bool  # intensity > 0
    W: float  # the schedule's; the rule's own weight is 1 + intensity * (W - 1)
    M: float
    entropy: float  # as given, also NaN
    smoothed_entropy: float  # NaN until a finite entropy was seen
    target_entropy: float  # NaN while "auto" is still measuring
    nonfinite: int  # how many NaN or infinite entropies so far
    intensity: float = 0.0  # lambda, in [0, 1]
    advantage_factor: float = 1.0  # g, multiplies every advantage of the step
    measuring: bool = False  # is the target of "auto" still unknown?

    def metrics(self) -> dict[str, float]:
        """Figures for the log; all finite."""
        figures = {
            "stare/open": float(self.open),
            "stare/intensity": self.intensity,
            "stare/advantage_factor": self.advantage_factor,
            "stare/W": self.W,
            "stare/M": self.M,
            "stare/target_entropy": self.target_entropy,
            "stare/smoothed_entropy": self.smoothed_entropy,
            "stare/nonfinite_entropy": float(self.nonfinite),
            "stare/measuring_target": float(self.measuring),
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
        self._intensity = 1.0 if config.mode == "off" and not config.is_auto else 0.0
        self._factor = 1.0
        self._integral = 0.0
        self._smoothed = 0.0  # meaningless until _finite > 0
        self._finite = 0
        self._nonfinite = 0
        self._measured = 0  # steps that "auto" has seen, at most auto_steps
        self._start_sum = 0.0  # of their entropies

    @property
    def target_entropy(self) -> float:
        """Nats; NaN while "auto" is still measuring."""
        config = self.config
        if not config.is_auto:
            return float(config.target_entropy)
        if self._measured < config.auto_steps:
            return math.nan
        return config.auto_fraction * self._start_sum / self._measured

    def update(self, entropy: float) -> GateDecision:
        """Take H of this step, move W and M, and decide.

        W and M move before they are used, by the entropy of the same step, as in the
        published code. A NaN or infinite H changes nothing: the last decision stands
        (before the first finite one: closed, or open for mode "off" with a target that
        is a number), and it is counted.

        Raises:
            ValueError: the starting entropy that "auto" measured is not above 0, or gives
                a target that the schedule cannot hold in the band of the config.
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

        A fixed schedule keeps the W and M of its own config, a target that is a number
        its own target. States written before the modes "intensity" and "band" existed
        lack some entries and are refused.
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
        if config.is_auto and self._measured < config.auto_steps:
            self._measure(entropy)  # the steps that are measured are not steered
            return
        self._move(entropy)
        self._intensity, self._factor = self._strength(entropy)

    def _measure(self, entropy: float) -> None:
        self._measured += 1
        self._start_sum += entropy
        if self._measured < self.config.auto_steps:
            return
        if self._start_sum <= 0:
            mean = self._start_sum / self._measured
            raise ValueError(
                f"target_entropy='auto': the mean entropy of the first {self._measured} steps is {mean}, "
                "so no fraction of it can be a target; give a number"
            )
        self.config.check_reach(self.target_entropy)

    def _move(self, entropy: float) -> None:
        config, target = self.config, self.target_entropy
        if config.schedule == "sign":
            clips = {"alpha": config.alpha, "W_max": config.W_max, "M_min": config.M_min}
            self._W, self._M = sign_step(self._W, self._M, target - entropy, **clips)
        elif config.schedule == "pi":
            error = (target - self._smoothed) / target
            clips = {"lowest": math.log(config.W_min), "highest": math.log(config.W_max)}
            self._integral, u = pi_step(self._integral, error, kp=config.kp, ki=config.ki, **clips)
            self._W, self._M = math.exp(u), max(config.M_min, math.exp(-u))

    def _strength(self, entropy: float) -> tuple[float, float]:
        """(lambda, g) for this entropy."""
        config, target = self.config, self.target_entropy
        if config.mode == "off":
            return 1.0, 1.0
        if config.mode == "target":
            return float(entropy < target), 1.0
        band = config.band(target)
        if config.mode == "intensity":
            return band.inside_fall(entropy), 1.0
        return band.below(entropy), band.factor(entropy, config.g_min, config.g_max)

    def _decision(self, entropy: float) -> GateDecision:
        rule = self.config.rule
        if self.config.schedule != "fixed":
            rule = rule.with_strength(self._W, self._M)
        applied = rule.with_intensity(self._intensity)
        target = self.target_entropy
        return GateDecision(
            rule=None if applied.is_identity else applied,
            open=self._intensity > 0,
            W=rule.high_positive,
            M=rule.high_negative,
            entropy=entropy,
            smoothed_entropy=self._smoothed if self._finite else math.nan,
            target_entropy=target,
            nonfinite=self._nonfinite,
            intensity=self._intensity,
            advantage_factor=self._factor,
            measuring=math.isnan(target),
        )


_STATE: dict[str, type] = {
    "W": float,
    "M": float,
    "intensity": float,
    "factor": float,
    "integral": float,
    "smoothed": float,
    "finite": int,
    "nonfinite": int,
    "measured": int,
    "start_sum": float,
}
