"""Reading config.json: both spellings, and every setting that would be computed wrongly refused."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from megatron_stare.errors import UserError
from megatron_stare.weights import check_tp, read_hf_config
from megatron_stare.weights.hf_config import parse_hf_config

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 250,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
LLAMA = {**QWEN3, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_fields_are_read():
    hf = parse_hf_config(QWEN3)
    assert (hf.num_layers, hf.hidden_size, hf.ffn_size, hf.vocab_size) == (2, 64, 96, 250)
    assert (hf.num_heads, hf.num_kv_heads, hf.head_dim, hf.attention_size) == (8, 4, 16, 128)
    assert (hf.rope_theta, hf.rope_scaling, hf.norm_eps, hf.tied_embeddings) == (1e6, None, 1e-5, True)
    assert (hf.qk_norm, hf.qkv_bias) == (True, False)
    assert hf.eos_token_ids == ()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_what_transformers_writes_is_read_as_transformers_means_it(family, tmp_path):
    config = AutoConfig.for_model(family, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    config.architectures = [{"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family] + "ForCausalLM"]
    config.save_pretrained(tmp_path)
    hf = read_hf_config(tmp_path)
    assert hf.family.name == family
    assert hf.rope_theta == config.rope_parameters["rope_theta"]
    assert hf.norm_eps == config.rms_norm_eps
    assert hf.tied_embeddings == config.tie_word_embeddings
    assert hf.num_kv_heads == config.num_key_value_heads
    assert hf.head_dim == (getattr(config, "head_dim", None) or 16)


def test_old_and_new_spelling_of_rotary_settings_agree():
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}
    new = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_theta": 5e5, **LLAMA3_ROPE}
    assert parse_hf_config(old) == parse_hf_config(new)
    assert parse_hf_config(new).rope_theta == 5e5
    assert parse_hf_config(new).rope_scaling["factor"] == 32.0


def test_missing_head_dim_is_the_default_that_transformers_has():
    raw = {k: v for k, v in QWEN3.items() if k != "head_dim"}
    assert parse_hf_config(raw).head_dim == AutoConfig.for_model("qwen3").head_dim == 128


def test_missing_head_dim_and_key_value_heads_follow_from_the_heads():
    raw = {k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads")}
    hf = parse_hf_config(raw)
    assert (hf.head_dim, hf.num_kv_heads) == (8, 8)


@pytest.mark.parametrize(
    "raw, change, message",
    [
        (QWEN3, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; known: Llama"),
        (QWEN3, {"architectures": None, "model_type": None}, "none named is not supported"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (QWEN3, {"attention_bias": True}, "attention_bias=True is not supported"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias=True is not supported"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, "sliding-window"),
        (QWEN3, {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        (LLAMA, {"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 8.0}}, "high_freq_factor=8.0"),
        (LLAMA, {"rope_scaling": {**LLAMA3_ROPE, "factor": None}}, "needs factor >= 1"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (QWEN3, {"hidden_size": None}, "hidden_size must be a positive whole number, not None"),
        (QWEN3, {"vocab_size": "250"}, "vocab_size must be a positive whole number, not '250'"),
        (QWEN3, {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
    ],
)
def test_settings_that_would_be_computed_wrongly_are_refused(raw, change, message):
    with pytest.raises(UserError, match=message):
        parse_hf_config({**raw, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_accepted(change):
    parse_hf_config({**QWEN3, **change})


def test_missing_directory_config_and_broken_json_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3)[:-5])
    with pytest.raises(UserError, match=r"config\.json cannot be read as JSON"):
        read_hf_config(tmp_path)


def test_tp_that_does_not_divide_the_model_is_refused_with_what_works():
    check_tp(parse_hf_config(QWEN3), 4)
    with pytest.raises(UserError, match="tp=8 does not divide the model's 4 key-value heads.*: 1, 2, 4"):
        check_tp(parse_hf_config(QWEN3), 8)
