"""A rank's parameters are recognised under both of Megatron's naming schemes, and none is left over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_stare.errors import UserError
from megatron_stare.weights import load_hf_weights, read_hf_config, write_tiny_checkpoint
from megatron_stare.weights.mapping import check_tied, match_entries, model_entries


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("m") / "model", tied=False)


@pytest.fixture(scope="module")
def hf(checkpoint):
    return read_hf_config(checkpoint)


def parameters(hf, *, fused, tp=1, layers=(0, 1)):
    """Parameters as a model holds them, by name; `fused` as Transformer Engine names them."""
    found = {}
    for entry in model_entries(hf):
        name = entry.names[-1 if fused else 0]
        if name.startswith("decoder.layers.") and int(name.split(".")[2]) not in layers:
            continue
        shape = entry.layout.shard_shape(tp) or (128 // tp, hf.hidden_size)
        found[name] = nn.Parameter(torch.empty(shape))
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_all_parameters_of_a_stage_are_matched_in_hugging_face_order(hf, fused, tp):
    held = parameters(hf, fused=fused, tp=tp, layers=(1,))
    pairs = match_entries(model_entries(hf), held, tp)
    assert [p.data_ptr() for _, p in pairs] == [p.data_ptr() for p in held.values()]


def test_the_norms_that_transformer_engine_folds_into_the_next_linear(hf):
    names = {e.hf[0]: e.names for e in model_entries(hf)}
    assert names["model.layers.1.input_layernorm.weight"] == (
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
    )
    assert names["model.layers.0.post_attention_layernorm.weight"] == (
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    )


def test_a_parameter_that_the_family_does_not_have(hf):
    held = parameters(hf, fused=False)
    held["decoder.layers.0.self_attention.linear_proj.bias"] = nn.Parameter(torch.zeros(64))
    with pytest.raises(UserError, match=r"no tensor for the Megatron parameter .*linear_proj\.bias"):
        match_entries(model_entries(hf), held, 1)


def test_a_parameter_that_the_model_should_have(hf):
    held = parameters(hf, fused=False)
    del held["decoder.layers.1.self_attention.q_layernorm.weight"]
    with pytest.raises(UserError, match=r"no parameter decoder\.layers\.1\.self_attention\.q_layernorm"):
        match_entries(model_entries(hf), held, 1)


def test_a_model_of_another_size(hf):
    held = parameters(hf, fused=False, tp=2)
    with pytest.raises(UserError, match=r"embeddings\.weight has shape \[64, 64\].*\[>=128, 64\] at tp=1"):
        match_entries(model_entries(hf), held, 1)


def test_a_model_that_ties_what_the_checkpoint_does_not(hf, checkpoint):
    class Tied(nn.Module):
        share_embeddings_and_output_weights = True

    with pytest.raises(ValueError, match="share_embeddings_and_output_weights=True"):
        check_tied([Tied()], hf)
    with pytest.raises(ValueError, match="share_embeddings_and_output_weights=True"):
        load_hf_weights([Tied()], checkpoint, hf, tp_rank=0, tp_size=1)
