"""The function that docs/use-in-your-trainer.md tells people to copy does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megatron_stare.stare import EntropyGate, GateConfig, ReweightRule, token_weights

PAGE = Path(__file__).parents[2] / "docs" / "use-in-your-trainer.md"


def test_the_function_to_copy_weighs_advantages_by_the_gate_s_rule() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    namespace: dict = {}
    exec(code, namespace)

    generator = torch.Generator().manual_seed(0)
    log_probs = torch.rand(8, 20, generator=generator).log()
    entropy = torch.rand(8, 20, generator=generator)
    advantage = torch.randn(8, 1, generator=generator).expand(8, 20)
    mask = torch.rand(8, 20, generator=generator) < 0.7
    H = entropy[mask].double().mean().item()

    config = GateConfig(mode="band", rule=ReweightRule.c2(), H_min=2 * H, H_max=3 * H)
    namespace["gate"] = EntropyGate(config)
    weighted, metrics = namespace["stare_advantages"](log_probs, entropy, advantage, mask)
    decision = EntropyGate(config).update(H)
    assert decision.advantage_factor < 1 and decision.rule is not None
    expected = advantage * token_weights(-log_probs, advantage, mask, decision.rule)
    torch.testing.assert_close(weighted, expected * decision.advantage_factor)
    assert metrics["stare/advantage_factor"] == decision.advantage_factor

    namespace["gate"] = EntropyGate(GateConfig(target_entropy=H / 2))  # closed
    unchanged, _ = namespace["stare_advantages"](log_probs, entropy, advantage, mask)
    assert torch.equal(unchanged, advantage)
