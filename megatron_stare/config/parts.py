"""Sections of the config as the values that `stare` and `objective` take.

Apart from the schema, because these need torch, and because here the parts' own checks speak.
"""

from __future__ import annotations

from megatron_stare.config.schema import AlgorithmSection, StareSection
from megatron_stare.objective import ENTROPY_CONTROLS, ObjectiveSpec
from megatron_stare.objective.entropy_control import EntropyControl
from megatron_stare.stare import GateConfig, ReweightRule

_SPEC = (
    *("loss", "clip_low", "clip_high", "dual_clip", "kl_coef", "kl_estimator", "entropy_coef"),
    *("correction", "correction_level", "correction_cap", "correction_floor"),
)
_GATE = (
    *("schedule", "target_entropy", "alpha", "W_max", "M_min", "W_min", "kp", "ki", "smoothing"),
    *("H_min", "H_max", "g_min", "g_max", "ramp", "auto_steps", "auto_fraction"),
)


def objective_spec(section: AlgorithmSection) -> ObjectiveSpec:
    """The loss. ValueError for a value out of range, by name."""
    return ObjectiveSpec(**{name: getattr(section, name) for name in _SPEC})


def entropy_control(section: AlgorithmSection) -> EntropyControl | None:
    """The control beside the loss. ValueError for arguments that it lacks, or out of range."""
    if section.entropy_control == "none":
        if section.control_args:
            raise ValueError("control_args are given, but entropy_control is none")
        return None
    kind = ENTROPY_CONTROLS[section.entropy_control]
    try:
        return kind(**section.control_args)
    except TypeError as error:
        known = ", ".join(kind.__dataclass_fields__)
        raise ValueError(
            f"control_args={section.control_args}: {section.entropy_control} takes {known}"
        ) from error


def gate_config(section: StareSection) -> GateConfig:
    """The gate. ValueError for a combination that cannot work, by name."""
    values = {name: getattr(section, name) for name in _GATE}
    return GateConfig(mode=section.gate, rule=reweight_rule(section), **values)


def reweight_rule(section: StareSection) -> ReweightRule:
    """The section's rule. ValueError for a weight out of range."""
    share = section.top_fraction
    match section.rule:
        case "o1":
            return ReweightRule.o1(W=section.W, top_fraction=share)
        case "c2":
            return ReweightRule.c2(W=section.W, M=section.M, top_fraction=share)
        case "four_quadrant":
            return ReweightRule.four_quadrant(M_low=section.M_low, M=section.M, top_fraction=share)
    return ReweightRule.custom(**section.weights, pool=section.pool, top_fraction=share)
