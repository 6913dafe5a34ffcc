"""What is run: a method with its settings, a learning rate, a start, seeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LR = 1e-3
STEPS = 1000
RIVAL_STEPS = 400
NOISE = 0.03  # share of wrong examples in the warm-up; the more, the higher the starting entropy
MAIN_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Setting:
    """One line of the table.

    Attributes:
        method: the family, one colour in the figures.
        label: what sets it apart within the family; empty for its default.
        values: keys of the config that differ from plain GRPO.
        lr: learning rate, constant after ten steps of warm-up.
        steps: of reinforcement learning.
        seeds: each with a policy, a warm-up and prompts of its own.
        noise: of the warm-up's examples.
    """

    method: str
    label: str = ""
    values: dict[str, Any] = field(default_factory=dict, hash=False)
    lr: float = LR
    steps: int = STEPS
    seeds: tuple[int, ...] = (0,)
    noise: float = NOISE

    @property
    def name(self) -> str:
        """Of its results: unique, and the same from one call to the next."""
        words = [self.method, self.label, f"lr{self.lr:g}", f"noise{self.noise:g}"]
        return "_".join(word for word in words if word).replace(" ", "-").replace("/", "-").replace("=", "")


def _stare(rule: str, schedule: str, fraction: float = 0.88, **more: Any) -> dict[str, Any]:
    # The target is a little below the start: the slowest of the learning rates must get there in 100 steps.
    gate = "off" if schedule == "pi" else "target"
    clips = {"pi": (10.0, 0.1), "sign": (3.0, 0.2)}.get(schedule, (1.5, 0.5))
    values = {
        "enabled": True,
        "rule": rule,
        "gate": gate,
        "schedule": schedule,
        "target_entropy": "auto",
        "auto_fraction": fraction,
        "W_max": clips[0],
        "M_min": clips[1],
    }
    return {f"stare.{key}": value for key, value in (values | more).items()}


def _control(name: str, **arguments: float) -> dict[str, Any]:
    return {"algorithm.entropy_control": name, "algorithm.control_args": arguments}


def _kl_cov(fraction: float) -> dict[str, Any]:
    # Its penalty has a gradient only where the policy has moved since the step began.
    loss = {"algorithm.loss": "unclipped", "batch.updates_per_step": 2}
    return _control("kl_cov", fraction=fraction, coef=1.0) | loss


def _clip_cov(fraction: float) -> dict[str, Any]:
    return _control("clip_cov", fraction=fraction, low=1.0, high=5.0)


def _rival(method: str, label: str, values: dict[str, Any]) -> Setting:
    return Setting(method, label, values, steps=RIVAL_STEPS)


_COEFS = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
_FULL_GROUPS = {"algorithm.dynamic_sampling": True}
_DAPO = _FULL_GROUPS | {"algorithm.clip_high": 0.28}
MAIN = [
    Setting("GRPO", seeds=MAIN_SEEDS),
    Setting("STARE o1", "pi", _stare("o1", "pi"), seeds=MAIN_SEEDS),
    Setting("STARE c2", "pi", _stare("c2", "pi"), seeds=MAIN_SEEDS),
    Setting("DAPO", "", _DAPO, seeds=MAIN_SEEDS),
    Setting("STARE o1", "pi two-sided", _stare("o1", "pi", W_min=0.5)),
    Setting("STARE c2", "pi two-sided", _stare("c2", "pi", W_min=0.5)),
]
RATES = [
    *(Setting("STARE o1", "pi", _stare("o1", "pi"), lr=lr, seeds=MAIN_SEEDS) for lr in (1e-4, 1e-5)),
    *(Setting("STARE c2", "pi", _stare("c2", "pi"), lr=lr) for lr in (1e-4, 1e-5)),
    *(Setting("GRPO", lr=lr, seeds=MAIN_SEEDS) for lr in (1e-4, 1e-5)),
]
RIVALS = [
    _rival("GRPO + dynamic sampling", "", _FULL_GROUPS),
    # Its upper clip acts only where the policy moves within a step.
    _rival("DAPO", "4 updates", _DAPO | {"batch.updates_per_step": 4}),
    *(_rival("entropy bonus", f"{c:g}", {"algorithm.entropy_coef": c}) for c in _COEFS),
    *(_rival("KL-Cov", f"{f:g}", _kl_cov(f)) for f in (2e-3, 2e-2, 0.1)),
    *(_rival("Clip-Cov", f"{f:g}", _clip_cov(f)) for f in (2e-4, 2e-2)),
    *(_rival("80-20", f"{f:g}", _control("top_entropy", fraction=f)) for f in (0.2, 0.5)),
    *(_rival(f"STARE {rule}", "fixed", _stare(rule, "fixed")) for rule in ("o1", "c2")),
    *(_rival(f"STARE {rule}", "sign", _stare(rule, "sign", alpha=0.02)) for rule in ("o1", "c2")),
    *(_rival("STARE o1", f"pi {f:g}", _stare("o1", "pi", f)) for f in (0.4, 0.6, 0.75)),
]
STARTS = [
    Setting("STARE o1", "pi half", _stare("o1", "pi", 0.5), steps=RIVAL_STEPS, lr=lr, noise=noise)
    for noise in (0.03, 0.1, 0.3)
    for lr in (3e-4, 1e-3)
]
_SMALL = {"batch.prompts_per_step": 2, "batch.responses_per_prompt": 8}
SMALL = [
    Setting("small batch", label, _SMALL | values, steps=RIVAL_STEPS, lr=lr)
    for lr in (1e-3, 1e-4)
    for label, values in [("GRPO", {})]
    + [(f"ema {decay:g}", _stare("c2", "pi", threshold_ema=decay)) for decay in (0.0, 0.9)]
]
PARTS = {"main": MAIN, "rates": RATES, "rivals": RIVALS, "starts": STARTS, "small": SMALL}


def runs(parts: tuple[str, ...] = tuple(PARTS)) -> list[tuple[Setting, int]]:
    """Every setting of these parts with each of its seeds; the first seed of all before the second of any."""
    pairs = [(setting, seed) for part in parts for setting in PARTS[part] for seed in setting.seeds]
    return sorted(pairs, key=lambda pair: pair[1])
