"""STARE in a run: its gate, thresholds and statistics, and the state of all of it between steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_stare.config.parts import gate_config
from megatron_stare.config.schema import Config, StareSection
from megatron_stare.engine.batch import Microbatch
from megatron_stare.engine.step import Signals
from megatron_stare.stare import (
    EntropyGate,
    GateDecision,
    ThresholdEMA,
    quadrant_figures,
    quadrant_sums,
    surprisal_thresholds,
    token_weights,
)


class Stare:
    """Decides once a step, and weighs the step's tokens over all replicas."""

    def __init__(self, section: StareSection) -> None:
        self.gate = EntropyGate(gate_config(section))
        self._average = ThresholdEMA(section.threshold_ema) if section.threshold_ema else None

    @classmethod
    def of(cls, config: Config) -> Stare | None:
        """As the config describes it; None where STARE is off."""
        return cls(config.stare) if config.stare.enabled and config.objective == "rl" else None

    def decide(self, signals: Signals) -> GateDecision:
        """The gate's decision for this step."""
        return self.gate.update(signals.mean_entropy)

    def weigh(
        self,
        microbatches: list[Microbatch],
        signals: Signals,
        decision: GateDecision,
        group: dist.ProcessGroup,
    ) -> tuple[list[torch.Tensor | None], dict[str, float]]:
        """Token weights a microbatch, float32 [N], and figures of the four quadrants for the log.

        Weights are None where the decision has no rule, which is plain GRPO. Surprisal is ranked over the
        whole step and all replicas, under the policy at the start of the step. Collective over `group`.
        """
        surprisal = -torch.cat(signals.log_probs)
        advantage = torch.cat([mb.advantages for mb in microbatches])
        mask = torch.ones_like(advantage, dtype=torch.bool)
        tokens = (surprisal, advantage, mask)
        thresholds = surprisal_thresholds(*tokens, self.gate.config.rule, group)
        if self._average:
            thresholds = self._average.update(thresholds)
        weights = token_weights(*tokens, decision.rule, thresholds=thresholds) if decision.rule else None
        entropy = torch.cat(signals.entropy)
        sums = quadrant_sums(*tokens, thresholds, weights=weights, entropy=entropy)
        packed = torch.stack(list(sums.values()))
        dist.all_reduce(packed, group=group)
        figures = quadrant_figures(dict(zip(sums, packed.tolist(), strict=True)))
        if weights is None:
            return [None] * len(microbatches), figures
        return list(weights.split([mb.response_tokens for mb in microbatches])), figures

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as plain numbers."""
        average = self._average.state_dict() if self._average else None
        return {"gate": self.gate.state_dict(), "thresholds": average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`. An average that was off before starts anew."""
        self.gate.load_state_dict(state["gate"])
        if self._average and state["thresholds"] is not None:
            self._average.load_state_dict(state["thresholds"])
