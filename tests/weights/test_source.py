"""Damaged and unfitting checkpoints are refused before a parameter is touched, naming tensor and file."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_stare.errors import UserError
from megatron_stare.weights import load_hf_weights, read_hf_config, write_tiny_checkpoint

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tmp_path):
    return write_tiny_checkpoint(tmp_path / "model", architecture="qwen3", tied=False)


@pytest.fixture
def sharded(tmp_path, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="80KB")
    return tmp_path / "sharded"


def load(directory):
    """Loading into a rank without parameters: everything but the copying."""
    load_hf_weights([], directory, read_hf_config(directory), tp_rank=0, tp_size=1)


def rewrite(directory, change):
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)


def test_a_sound_checkpoint_passes_single_and_sharded(checkpoint, sharded):
    load(checkpoint)
    load(sharded)


def test_no_weights_at_all(checkpoint):
    (checkpoint / SINGLE).unlink()
    with pytest.raises(UserError, match="has no weights"):
        load(checkpoint)


def test_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name} is missing"):
        load(sharded)


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5, 0.999])
def test_truncated_shard(sharded, keep):
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    data = shard.read_bytes()
    shard.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(UserError, match=f"{shard.name} is damaged or incomplete"):
        load(sharded)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_broken_index(sharded, text):
    (sharded / INDEX).write_text(text)
    with pytest.raises(UserError, match="not a readable index"):
        load(sharded)


def test_index_that_names_the_wrong_file(sharded):
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = next(n for n, f in index["weight_map"].items() if f == files[0])
    index["weight_map"][name] = files[1]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{name} should be in {files[1]}"):
        load(sharded)


def test_index_that_leaves_the_directory(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../model/model.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="not a file name"):
        load(sharded)


def test_missing_tensor(checkpoint):
    rewrite(checkpoint, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(checkpoint)


def test_unknown_tensor(checkpoint):
    rewrite(checkpoint, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}))
    with pytest.raises(UserError, match=r"does not use: model\.layers\.0\.self_attn\.o_proj\.bias"):
        load(checkpoint)


def test_wrong_shape_names_tensor_file_and_shapes(checkpoint):
    rewrite(checkpoint, lambda t: t.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight in .*safetensors has shape \[65\].*\[64\]"):
        load(checkpoint)


def test_quantised_dtype(checkpoint):
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(checkpoint, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(UserError, match=f"{name} in .* is stored as F8_E4M3"):
        load(checkpoint)


def test_more_layers_than_the_config_says(checkpoint):
    raw = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 1}))
    with pytest.raises(UserError, match=r"does not use: model\.layers\.1\..* and 8 more"):
        load(checkpoint)


def test_buffers_of_old_checkpoints_and_a_stored_tied_head_are_ignored(tmp_path):
    directory = write_tiny_checkpoint(tmp_path / "tied", architecture="llama", tied=True)
    rewrite(
        directory,
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            }
        ),
    )
    load(directory)
