"""STARE (arXiv 2606.19236): surprisal-guided token reweighting. Needs only torch."""

from __future__ import annotations

from megatron_stare.stare.gate import EntropyGate, GateConfig, GateDecision
from megatron_stare.stare.quantile import KthLargest, kth_largest
from megatron_stare.stare.reweight import (
    ReweightRule,
    Thresholds,
    surprisal_thresholds,
    token_weights,
    weight_sums,
)

__all__ = [
    "EntropyGate",
    "GateConfig",
    "GateDecision",
    "KthLargest",
    "ReweightRule",
    "Thresholds",
    "kth_largest",
    "surprisal_thresholds",
    "token_weights",
    "weight_sums",
]
