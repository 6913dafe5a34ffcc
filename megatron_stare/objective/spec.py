"""Which objective a trainer maximises: one general form, of which the published ones are special cases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from megatron_stare.objective.kl import KlEstimator
from megatron_stare.objective.rollout_correction import CorrectionKind, CorrectionLevel

LossKind = Literal["ppo_clip", "gspo", "gspo_token", "cispo", "unclipped"]


@dataclass(frozen=True)
class ObjectiveSpec:
    """The settings of `objective_loss`.

    Args:
        loss: the policy term, see `surrogate`. PPO, GRPO and DAPO are "ppo_clip".
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; 0 <= clip_low < 1 and
            clip_high >= 0. For "cispo" clip_low may be 1: no lower bound, as in the paper.
        dual_clip: where A < 0, the ratio counts as at most this much; above 1, or None for off.
        kl_coef: of the KL divergence to a reference policy, at least 0; 0 needs no reference.
        kl_estimator: "k1", "k2" or "k3", see `kl_estimate`.
        entropy_coef: of the entropy bonus, at least 0.
        old_kl: "abs" or "k2": the penalty towards the policy at the start of the step, for tokens whose
            `TokenTerms.kl_coef` asks for it (KL-Cov).
        correction, correction_level, correction_cap, correction_floor: see `rollout_correction`; the
            floor is for "mask" only.

    Raises:
        ValueError: a value out of range, by name.
    """

    loss: LossKind = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    old_kl: Literal["abs", "k2"] = "abs"
    correction: CorrectionKind = "none"
    correction_level: CorrectionLevel = "token"
    correction_cap: float = 2.0
    correction_floor: float = 0.0

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for name in ("loss", "old_kl", "correction", "correction_level"):
            one_of(name, getattr(self, name), get_args(kinds[name]))
        one_of("kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        check_bounds(self.clip_low, self.clip_high, self.dual_clip, no_lower_bound=self.loss == "cispo")
        for name in ("kl_coef", "entropy_coef", "correction_floor"):
            at_least_zero(name, getattr(self, name))
        if not self.correction_cap > 0:
            raise ValueError(f"correction_cap={self.correction_cap} is not above 0")
        if self.correction_floor > 0 and self.correction != "mask":
            raise ValueError(
                f"correction_floor={self.correction_floor} is for correction='mask', not {self.correction!r}"
            )
        if self.correction_floor > self.correction_cap:
            raise ValueError(
                f"correction_floor={self.correction_floor} is above correction_cap={self.correction_cap}"
            )

    @property
    def needs_sequence(self) -> bool:
        """Whether the loss must know which sequence a token belongs to."""
        by_sequence = self.correction != "none" and self.correction_level == "sequence"
        return self.loss in ("gspo", "gspo_token") or by_sequence

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference policy are needed."""
        return self.kl_coef > 0

    @property
    def needs_sampler_log_probs(self) -> bool:
        """Whether the sampler's log-probs are needed."""
        return self.correction != "none"

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the entropy must come with a gradient."""
        return self.entropy_coef > 0


def check_bounds(
    clip_low: float, clip_high: float, dual_clip: float | None, no_lower_bound: bool = False
) -> None:
    """Raise ValueError for a clip range that is none; `no_lower_bound` allows clip_low=1."""
    if not (0 <= clip_low < 1 or (no_lower_bound and clip_low == 1)):
        raise ValueError(f"clip_low={clip_low} is not in [0, 1{']' if no_lower_bound else ')'}")
    if not clip_high >= 0:
        raise ValueError(f"clip_high={clip_high} is negative")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip} is not above 1")


def at_least_zero(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value} is not a finite number of at least 0")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is none of {', '.join(allowed)}")
