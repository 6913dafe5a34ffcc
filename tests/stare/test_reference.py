"""The released implementation's own outputs: 24 weightings exactly, 6 controllers to 1e-6."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_stare.stare import EntropyGate, GateConfig, ReweightRule, token_weights, weight_sums

REFERENCE = json.loads((Path(__file__).parents[1] / "fixtures" / "stare_reference.json").read_text())




def test_the_fixture_is_complete() -> None:
    assert len(REFERENCE["cases"]) == 24
    assert len(REFERENCE["controller"]) == 6


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: case["name"])
def test_weights_equal_the_reference(case: dict) -> None:
    surprisal = -torch.tensor(case["log_probs"])
    lengths = torch.tensor(case["lengths"])
    mask = torch.arange(surprisal.shape[1]) < lengths[:, None]
    advantage = torch.tensor(case["advantages"])[:, None].expand_as(surprisal)
    P = case["top_ratio"]
    W, M = case["W"], case["M"]
    rule = ReweightRule.o1(W, P) if case["variant"] == "O1" else ReweightRule.c2(W, M, P)

    # The recording forced the gate, so its entropy (always 0.2) says nothing about it.
    stats = case["stats"]
    target = stats["stare/target_entropy"]
    gate = EntropyGate(GateConfig(target_entropy=target, rule=rule))
    decision = gate.update(target - 0.1 if case["gate_on"] else target + 0.1)
    assert decision.open == case["gate_on"]
    weights = (
        torch.ones_like(surprisal)
        if decision.rule is None
        else token_weights(surprisal, advantage, mask, decision.rule)
    )
    assert torch.equal(weights, torch.tensor(case["weights"]))

    sums = {name: value.item() for name, value in weight_sums(weights, advantage, mask).items()}
    share = {name: value / sums["tokens"] for name, value in sums.items()}
    assert share["positive"] == pytest.approx(stats["stare/positive_candidate_ratio"])
    assert share["negative"] == pytest.approx(stats["stare/negative_candidate_ratio"])
    if case["gate_on"]:  # with the gate off the reference reports what it would have done
        assert share["raised"] == pytest.approx(stats["stare/positive_reweight_ratio"])
        assert share["lowered"] == pytest.approx(stats["stare/negative_reweight_ratio"])
        assert share["weight"] == pytest.approx(stats["stare/mean_weight"])


@pytest.mark.parametrize("number", range(6))
def test_controllers_equal_the_reference(number: int) -> None:
    controller = REFERENCE["controller"][number]
    settings = controller["config"]
    gate = EntropyGate(
        GateConfig(
            schedule="sign" if settings["adaptive"] else "fixed",
            rule=ReweightRule.c2(settings["reweight_w"], settings["reweight_m"]),
            target_entropy=settings["target_entropy"],
            alpha=settings["alpha"],
            W_max=settings["w_max"],
            M_min=settings["m_min"],
        )
    )
    for step in controller["steps"]:
        entropy = math.nan if step["entropy"] is None else step["entropy"]
        decision = gate.update(entropy)
        assert decision.open == step["gate_on"]
        assert pytest.approx(step["W"], abs=1e-6) == decision.W
        assert pytest.approx(step["M"], abs=1e-6) == decision.M
        assert (decision.rule is not None) == step["gate_on"]
