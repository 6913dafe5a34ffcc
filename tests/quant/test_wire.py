"""Weights on their way to a block-wise FP8 server carry the tensors that an export would store."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from megatron_stare.quant import export_fp8
from megatron_stare.quant.wire import fp8_weights
from megatron_stare.weights import read_hf_config, write_tiny_checkpoint


@pytest.fixture
def source(tmp_path):
    return write_tiny_checkpoint(tmp_path / "source", architecture="qwen3", hidden=256, dtype="bfloat16")


def test_names_values_and_scales_are_those_of_an_export(source, tmp_path):
    export_fp8(source, tmp_path / "fp8", quant="fp8_blockwise", verify=False)
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    tensors = load_file(source / "model.safetensors")
    sent = dict(fp8_weights(tensors.items(), read_hf_config(source)))
    assert sent.keys() == stored.keys()
    for name, tensor in stored.items():
        assert sent[name].dtype == tensor.dtype, name
        assert torch.equal(sent[name].float(), tensor.float()), name


def test_tensors_that_are_whole_elsewhere_stay_placeholders(source):
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]
    passed = list(fp8_weights([(name, None) for name in names], read_hf_config(source)))
    assert passed == [(name, None) for name in names]


def test_a_weight_that_is_not_a_number_is_named(source):
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"{name}.*NaN"):
        list(fp8_weights([(name, torch.full((128, 256), float("nan")))], read_hf_config(source)))
