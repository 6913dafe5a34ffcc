"""Advantages and losses: small functions of tensors. Needs only torch."""

from __future__ import annotations

from megatron_stare.objective.advantage import grpo_advantages
from megatron_stare.objective.policy_loss import PolicyLoss, policy_loss, sft_loss

__all__ = ["PolicyLoss", "grpo_advantages", "policy_loss", "sft_loss"]
