"""STARE (arXiv 2606.19236): surprisal-guided token reweighting. Needs only torch."""

from __future__ import annotations

from megatron_stare.stare.gate import EntropyGate, GateDecision
from megatron_stare.stare.gate_config import GateConfig
from megatron_stare.stare.quantile import KthLargest, kth_largest
from megatron_stare.stare.reweight import (
    ReweightRule,
    Thresholds,
    surprisal_thresholds,
    token_weights,
    weight_sums,
)
from megatron_stare.stare.statistics import (
    entropy_sensitivity,
    quadrant_figures,
    quadrant_sums,
    sensitivity_centre,
)
from megatron_stare.stare.threshold_ema import ThresholdEMA

__all__ = [
    "EntropyGate",
    "GateConfig",
    "GateDecision",
    "KthLargest",
    "ReweightRule",
    "ThresholdEMA",
    "Thresholds",
    "entropy_sensitivity",
    "kth_largest",
    "quadrant_figures",
    "quadrant_sums",
    "sensitivity_centre",
    "surprisal_thresholds",
    "token_weights",
    "weight_sums",
]
