"""Shipped architectures are those of the published models."""

from __future__ import annotations

import json

import pytest

from megatron_stare.errors import UserError
from megatron_stare.plan.architecture import find_architecture, shipped_models
from megatron_stare.weights import write_tiny_checkpoint

# Parameter counts that the models' pages on the hub give (safetensors totals).
PUBLISHED = {
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
}


def test_parameter_counts_are_the_published_ones():
    assert shipped_models() == sorted(PUBLISHED)
    assert {name: find_architecture(name).parameters for name in PUBLISHED} == PUBLISHED


def test_active_parameters_leave_out_experts_that_are_not_chosen():
    model = find_architecture("Qwen3-30B-A3B")
    # Published: 3.3 B active of 30.5 B; the embedding is looked up, not multiplied with.
    assert model.active_parameters + 151_936 * 2048 == pytest.approx(3.35e9, rel=0.01)
    dense = find_architecture("Qwen3-8B")
    assert dense.active_parameters == dense.parameters - 151_936 * 4096


def test_the_last_part_of_a_missing_path_chooses_and_is_said_so():
    model = find_architecture("models/Qwen3-8B")
    assert model.hf.num_layers == 36
    assert model.source == "models/Qwen3-8B does not exist here: the shipped architecture of Qwen3-8B"


def test_a_directory_is_read_and_the_option_has_the_last_word(tmp_path):
    directory = write_tiny_checkpoint(tmp_path / "Qwen3-8B", layers=3)
    assert find_architecture(str(directory)).hf.num_layers == 3
    assert find_architecture(str(directory), "Qwen2.5-7B").hf.num_layers == 28
    assert find_architecture("models/none", str(directory)).source == f"{directory}/config.json"


def test_tied_embeddings_count_once(tmp_path):
    directory = write_tiny_checkpoint(tmp_path / "tied", layers=2, tied=True)
    untied = write_tiny_checkpoint(tmp_path / "untied", layers=2, tied=False)
    difference = find_architecture(str(untied)).parameters - find_architecture(str(directory)).parameters
    assert difference == 128 * 64


def test_unknown_models_are_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UserError, match=r"model\.path=models/Nothing-1B: .*Qwen3-8B"):
        find_architecture("models/Nothing-1B")
    with pytest.raises(UserError, match="--model=nowhere"):
        find_architecture("models/Qwen3-8B", "nowhere")


def test_what_the_engine_does_not_compute_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UserError, match="GPT2LMHeadModel"):
        find_architecture(str(tmp_path))
