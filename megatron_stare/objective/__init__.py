"""Advantages, losses and what steers them: small functions of tensors. Needs only torch and `stare`."""

from __future__ import annotations

from megatron_stare.objective.advantage import (
    advantages,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
    w_reinforce_advantages,
)
from megatron_stare.objective.combination import check_combination
from megatron_stare.objective.entropy_control import (
    ENTROPY_CONTROLS,
    ClipCov,
    EntropyAdvantage,
    EntropyControl,
    KlCov,
    TopEntropy,
    global_token_ids,
    prepare,
    token_covariance,
)
from megatron_stare.objective.kl import kl_estimate
from megatron_stare.objective.normalization import Normalization, normalization, normalizer, token_multipliers
from megatron_stare.objective.policy_loss import PolicyLoss, objective_loss, policy_loss, sft_loss
from megatron_stare.objective.rollout_correction import Correction, rollout_correction
from megatron_stare.objective.spec import ObjectiveSpec
from megatron_stare.objective.terms import TokenTerms

__all__ = [
    "ENTROPY_CONTROLS",
    "ClipCov",
    "Correction",
    "EntropyAdvantage",
    "EntropyControl",
    "KlCov",
    "Normalization",
    "ObjectiveSpec",
    "PolicyLoss",
    "TokenTerms",
    "TopEntropy",
    "advantages",
    "check_combination",
    "global_token_ids",
    "grpo_advantages",
    "kl_estimate",
    "normalization",
    "normalizer",
    "objective_loss",
    "policy_loss",
    "prepare",
    "reinforce_pp_advantages",
    "rloo_advantages",
    "rollout_correction",
    "sft_loss",
    "token_covariance",
    "token_multipliers",
    "w_reinforce_advantages",
]
