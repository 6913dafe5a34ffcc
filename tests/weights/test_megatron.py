"""Hugging Face checkpoints in real Megatron models on real processes, in every layout four of them allow."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_stare.weights import write_tiny_checkpoint
from tests.support.ranks import run_ranks

VOCAB = 250
LAYERS = 8


def _layouts() -> dict[str, dict[str, int]]:
    """Every combination of tensor, pipeline, virtual pipeline and expert parallelism on 4 processes."""
    layouts = {}
    for tp, pp, vpp, ep in product((1, 2, 4), (1, 2, 4), (None, 2, 4), (1, 2, 4)):
        fits = tp * pp <= 4 and 4 // pp % ep == 0
        if fits and (vpp is None or (pp > 1 and LAYERS % (pp * vpp) == 0)):
            sizes = {"tp": tp, "pp": pp} | ({"vpp": vpp} if vpp else {}) | ({"ep": ep} if ep > 1 else {})
            layouts["_".join(f"{k}{v}" for k, v in sizes.items())] = sizes
    return layouts


LAYOUTS = _layouts()
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CHECKPOINTS = {
    "qwen2_tied": {"architecture": "qwen2"},
    "qwen2_untied_bf16": {"architecture": "qwen2", "tied": False, "dtype": "bfloat16"},
    "qwen3_tied": {"architecture": "qwen3", "head_dim": 24},
    "qwen3_untied_bf16": {"architecture": "qwen3", "tied": False, "dtype": "bfloat16", "head_dim": 24},
    "qwen3_moe_untied": {"architecture": "qwen3_moe", "tied": False, "ffn": 32},
    "qwen3_moe_tied_bf16": {"architecture": "qwen3_moe", "dtype": "bfloat16", "ffn": 32},
    "llama_tied_bf16": {"architecture": "llama", "dtype": "bfloat16"},
    "llama_scaled": {"architecture": "llama", "tied": False, "rope_theta": 500000.0, "rope_scaling": SCALING},
    "mistral_untied": {"architecture": "mistral", "tied": False},
    "mistral_tied_bf16": {"architecture": "mistral", "dtype": "bfloat16"},
}
CASES = [
    (name, layout)
    for name in CHECKPOINTS
    for layout, sizes in LAYOUTS.items()
    if sizes.get("ep", 1) == 1 or "moe" in name
]


def _write(directory, **options):
    """A checkpoint in which no tensor is all ones or zeros, with transformers' logits beside it."""
    write_tiny_checkpoint(directory, layers=LAYERS, vocab_size=VOCAB, heads=8, kv_heads=4, **options)
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
    paths = {name: str(root / name) for name in CHECKPOINTS}
    arguments = {"checkpoints": paths, "layouts": LAYOUTS}
    return run_ranks("tests.weights.megatron_ranks:all_cases", 4, arguments, timeout=280)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("checkpoint", "layout"), CASES)
def test_round_trip_is_bit_exact_in_every_layout(ranks, checkpoint, layout):
    found = [rank[f"{checkpoint}/{layout}"] for rank in ranks]
    assert [rank["unfilled"] for rank in found] == [0, 0, 0, 0], "a parameter was not loaded"
    assert found[0]["exact"]
    assert found[0]["aliases"] == 0, "an exported tensor is the model's own memory"
    assert [rank["whole"] for rank in found] == [len(found[0]["names"]), 0, 0, 0]
    assert all(rank["names"] == found[0]["names"] for rank in found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("checkpoint", "layout"), [case for case in CASES if not case[0].endswith("bf16")])
def test_logits_equal_those_of_transformers(ranks, checkpoint, layout):
    differences = [rank[f"{checkpoint}/{layout}"]["logits"] for rank in ranks]
    differences = [d for d in differences if d is not None]
    assert differences
    assert max(differences) < 1e-4
