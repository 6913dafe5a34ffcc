"""FP8: what Megatron is told, and what is refused before it is."""

from __future__ import annotations

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_stare.engine.precision import (
    Machine,
    precision_fields,
    precision_problems,
    sequence_multiple,
    this_machine,
)

HOPPER, BLACKWELL = Machine((9, 0), (2, 20)), Machine((10, 0), (2, 20))
MODEL = {"dtype": "bfloat16", "layers": 28, "widths": {"hidden size": 1536, "feed-forward width": 8960}}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_megatron_accepts_the_arguments_of_every_recipe(recipe):
    keep = 0 if recipe == "delayed" else 2
    config = TransformerConfig(
        num_layers=8, hidden_size=128, num_attention_heads=4, **precision_fields(recipe, keep_ends=keep)
    )
    assert config.fp8 is not None
    assert config.fp8_recipe == recipe
    assert config.first_last_layers_bf16 == bool(keep)


def test_without_a_recipe_nothing_is_said():
    assert precision_fields("none") == {}
    assert sequence_multiple("none") == 1
    assert precision_problems("none", Machine(None, None), **MODEL) == []


@pytest.mark.parametrize(
    ("recipe", "machine"),
    [("delayed", HOPPER), ("tensorwise", HOPPER), ("blockwise", HOPPER), ("mxfp8", BLACKWELL)],
)
def test_a_recipe_runs_where_it_belongs(recipe, machine):
    assert precision_problems(recipe, machine, **MODEL) == []


@pytest.mark.parametrize(
    ("recipe", "machine", "change", "message"),
    [
        ("blockwise", Machine(None, None), {}, "needs a CUDA GPU, and none is here; allowed: none"),
        ("blockwise", Machine((9, 0), None), {}, "transformer-engine is not installed"),
        ("mxfp8", HOPPER, {}, "compute capability 9.0; allowed: delayed, tensorwise, blockwise"),
        ("blockwise", BLACKWELL, {}, "compute capability 10.0; allowed: delayed, tensorwise, mxfp8"),
        ("tensorwise", Machine((8, 0), (2, 20)), {}, "compute capability 8.0; allowed: none"),
        ("tensorwise", Machine((9, 0), (2, 1)), {}, "needs Transformer Engine 2.2 or newer; 2.1 is"),
        ("tensorwise", HOPPER, {"dtype": "float32"}, "with model.dtype=float32; allowed: bfloat16"),
        ("blockwise", HOPPER, {"widths": {"hidden size": 576}}, "hidden size is 576 on a rank, not a mult"),
        ("delayed", HOPPER, {"keep_ends": 1}, "every recipe but delayed"),
        ("tensorwise", HOPPER, {"keep_ends": 14}, "none of the 28 layers in FP8; allowed: 0 to 13"),
        ("none", HOPPER, {"keep_ends": 1}, "model.fp8_keep_ends=1: needs model.fp8"),
        ("none", HOPPER, {"fp8_parameters": True}, "model.fp8_parameters=True: needs model.fp8"),
    ],
)
def test_what_cannot_work_is_one_line(recipe, machine, change, message):
    (problem,) = precision_problems(recipe, machine, **MODEL | change)
    assert message in problem


def test_a_machine_without_gpu_says_so():
    import torch

    assert (this_machine().capability is None) == (not torch.cuda.is_available())
