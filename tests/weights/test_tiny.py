"""Tiny checkpoints are real, reproducible, and start near the uniform distribution."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_stare.errors import UserError
from megatron_stare.weights import write_tiny_checkpoint


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("hidden", [32, 256])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_first_distribution_is_close_to_uniform_at_any_width(tmp_path, architecture, hidden, tied):
    directory = write_tiny_checkpoint(tmp_path / "m", architecture=architecture, hidden=hidden, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokens = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        distribution = torch.distributions.Categorical(logits=model(tokens).logits)
    assert distribution.entropy().mean() > 0.97 * math.log(128)


def test_the_seed_decides_and_the_global_generator_is_left_alone(tmp_path):
    before = torch.random.get_rng_state()
    a, b, c = (
        load_file(write_tiny_checkpoint(tmp_path / name, seed=seed) / "model.safetensors")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    name = "model.embed_tokens.weight"
    assert torch.equal(a[name], b[name])
    assert not torch.equal(a[name], c[name])


def test_unknown_architecture(tmp_path):
    with pytest.raises(UserError, match="'gpt2' is not known; known: llama, mistral, qwen2"):
        write_tiny_checkpoint(tmp_path / "m", architecture="gpt2")
