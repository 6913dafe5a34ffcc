"""Hugging Face checkpoints in real Megatron models on real processes, in every layout four of them allow."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_stare.weights import write_tiny_checkpoint
from tests.support.ranks import run_ranks

VOCAB = 250
LAYOUTS = {
    "one": {"tp": 1, "pp": 1},
    "tp2": {"tp": 2, "pp": 1},
    "pp2": {"tp": 1, "pp": 2},
    "pp2_vpp2": {"tp": 1, "pp": 2, "vpp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
}
CHECKPOINTS = {
    "qwen2_tied": {"architecture": "qwen2"},
    "qwen3_tied": {"architecture": "qwen3", "head_dim": 24},
    "qwen3_untied_bf16": {"architecture": "qwen3", "tied": False, "dtype": "bfloat16"},
    "llama_tied_bf16": {"architecture": "llama", "dtype": "bfloat16"},
    "llama_untied": {"architecture": "llama", "tied": False, "rope_theta": 500000.0},
}


def _write(directory, **options):
    """A checkpoint in which no tensor is all ones or zeros, with transformers' logits beside it."""
    write_tiny_checkpoint(directory, layers=4, vocab_size=VOCAB, heads=8, kv_heads=2, **options)
    file = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: t + (0.1 * torch.randn(t.shape, generator=generator)).to(t.dtype) if t.dim() == 1 else t
        for name, t in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.randint(0, VOCAB, (2, 24), generator=generator)
    with torch.no_grad():
        torch.save({"tokens": tokens, "logits": model(tokens).logits}, directory / "reference.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(root):
    """What each of four ranks found, by case."""
    for name, options in CHECKPOINTS.items():
        _write(root / name, **options)
    return run_ranks(
        "tests.weights.megatron_ranks:all_cases",
        4,
        {
            "checkpoints": {name: str(root / name) for name in CHECKPOINTS},
            "layouts": LAYOUTS,
            "saved": str(root / "saved"),
        },
        timeout=150,
    )


@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
class TestEveryLayout:
    def test_every_parameter_is_loaded(self, ranks, checkpoint, layout):
        assert [rank[f"{checkpoint}/{layout}"]["unfilled"] for rank in ranks] == [0, 0, 0, 0]

    def test_export_is_bit_exact_and_shares_no_memory(self, ranks, checkpoint, layout):
        first = ranks[0][f"{checkpoint}/{layout}"]
        assert first["exact"]
        assert first["aliases"] == 0
        assert first["whole"] == len(first["names"])

    def test_ranks_of_the_first_replica_yield_the_same_names_and_only_rank_0_the_tensors(
        self, ranks, checkpoint, layout
    ):
        found = [rank[f"{checkpoint}/{layout}"] for rank in ranks]
        taking_part = [f for f in found if f["names"]]
        assert len(taking_part) == LAYOUTS[layout]["tp"] * LAYOUTS[layout]["pp"]
        assert all(f["names"] == found[0]["names"] for f in taking_part)
        assert [f["whole"] for f in found[1:]] == [0, 0, 0]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("checkpoint", [c for c in CHECKPOINTS if not c.endswith("bf16")])
def test_logits_equal_those_of_transformers(ranks, checkpoint, layout):
    differences = [rank[f"{checkpoint}/{layout}"]["logits"] for rank in ranks]
    differences = [d for d in differences if d is not None]
    assert differences
    assert max(differences) < 1e-4


@pytest.mark.timeout(180)
def test_ranks_together_save_a_sharded_checkpoint_that_transformers_loads(ranks, root):
    assert [rank["saved"]["wrote"] for rank in ranks] == [True, False, False, False]
    index = json.loads((root / "saved" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    saved = AutoModelForCausalLM.from_pretrained(root / "saved")
    source = AutoModelForCausalLM.from_pretrained(root / next(iter(CHECKPOINTS)), dtype=torch.bfloat16)
    assert saved.dtype == torch.bfloat16
    assert saved.state_dict().keys() == source.state_dict().keys()
    for name, tensor in source.state_dict().items():
        assert torch.equal(saved.state_dict()[name], tensor), name
