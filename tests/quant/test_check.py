"""The check of an export: exact where it can be, and it notices damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_stare.errors import UserError
from megatron_stare.quant import check, export_fp8, read, write
from megatron_stare.quant.blockwise import FP8
from megatron_stare.quant.calibration import built_in_texts
from megatron_stare.quant.source import open_checkpoint

WEIGHT = "model.layers.1.mlp.up_proj.weight"


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def double_one_block(tensors):
    tensors[f"{WEIGHT}_scale_inv"][2, 1] *= 2


def double_the_scale(tensors):
    tensors[WEIGHT.replace("weight", "weight_scale")] *= 2


def flip_one_sign(tensors):
    tensors[WEIGHT].view(torch.uint8)[200, 100] ^= 0x80


def nudge_a_norm(tensors):
    tensors["model.norm.weight"][3] += 0.01


def spoil_an_embedding(tensors):
    tensors["model.embed_tokens.weight"][1, 1] = float("nan")


DAMAGES = [
    ("fp8_blockwise", double_one_block, WEIGHT),
    ("fp8_blockwise", flip_one_sign, WEIGHT),
    ("fp8_blockwise", nudge_a_norm, "model.norm.weight"),
    ("fp8_blockwise", spoil_an_embedding, "model.embed_tokens.weight"),
    ("fp8", double_the_scale, WEIGHT),
    ("fp8", flip_one_sign, WEIGHT),
]


@pytest.mark.parametrize(("quant", "damage", "name"), DAMAGES)
def test_a_damaged_tensor_is_named(quant, damage, name, source_of, export_of, copy_of):
    directory = copy_of(export_of("qwen3", quant))
    source = open_checkpoint(source_of("qwen3"))
    check.check_tensors(source, directory)
    change(directory, damage)
    with pytest.raises(UserError, match=f"exported {name} is not its source rounded to FP8"):
        check.check_tensors(source, directory)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("quant", ["fp8", "fp8_blockwise"])
def test_a_scale_that_is_not_a_positive_number_is_refused(quant, value, export_of, copy_of):
    directory = copy_of(export_of("qwen3", quant))
    name = f"{WEIGHT}_scale_inv" if quant == "fp8_blockwise" else WEIGHT.replace("weight", "input_scale")

    def spoil(tensors):
        tensors[name].view(-1)[0] = value

    change(directory, spoil)
    with pytest.raises(UserError, match=f"{name} .* not a positive number"):
        read.Fp8Checkpoint(directory)


def test_missing_scales_and_other_dtypes_are_refused(export_of, copy_of):
    directory = copy_of(export_of("qwen3", "fp8_blockwise"))
    change(directory, lambda tensors: tensors.pop(f"{WEIGHT}_scale_inv"))
    with pytest.raises(UserError, match=f"lacks {WEIGHT}_scale_inv"):
        read.Fp8Checkpoint(directory)
    change(directory, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].bfloat16()}))
    with pytest.raises(UserError, match=rf"{WEIGHT} .* is BF16 \[384, 256\]; F8_E4M3 \[384, 256\] belongs"):
        read.Fp8Checkpoint(directory)


def test_a_checkpoint_of_another_kind_is_refused(source_of):
    with pytest.raises(UserError, match="describes no quantised checkpoint"):
        read.Fp8Checkpoint(source_of("qwen3"))


def test_export_refuses_what_went_wrong_while_writing(tmp_path, source_of, monkeypatch):
    right = write.quantize_blockwise

    def wrong(weight):
        values, scales = right(weight)
        return values, scales * 1.25

    monkeypatch.setattr(write, "quantize_blockwise", wrong)
    with pytest.raises(UserError, match="is not its source rounded to FP8"):
        export_fp8(source_of("qwen3"), tmp_path / "out", "fp8_blockwise")
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_beyond_the_limit(tmp_path, source_of):
    with pytest.raises(UserError, match="not published: log-probs differ .* --limit is 1e-06"):
        export_fp8(source_of("qwen3"), tmp_path / "out", "fp8_blockwise", limit=1e-6)
    assert list(tmp_path.iterdir()) == []


def test_log_probs_tell_damage_from_rounding(source_of, export_of, copy_of):
    directory = copy_of(export_of("qwen3", "fp8_blockwise"))
    source = open_checkpoint(source_of("qwen3"))
    texts = built_in_texts(source.directory, source.config.vocab_size)
    clean = check.compare(source, directory, texts)
    assert 0 < clean.mean < clean.largest < 0.5

    def damage(tensors):
        for name, tensor in tensors.items():
            if name.endswith("o_proj.weight_scale_inv"):
                tensor *= 8

    change(directory, damage)
    assert check.compare(source, directory, texts).mean > 3 * clean.mean


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_without_rounded_activations_it_computes_as_transformers_does(family, export_of, monkeypatch):
    """The emulation replaces the forward pass of experts: without rounding it must be transformers'."""
    import transformers

    directory = export_of(family, "fp8_blockwise")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )
    monkeypatch.setattr(read, "dynamic_rounding", lambda x: x)
    tokens = torch.tensor([[1, 4, 7, 10, 2, 11, 5, 5, 8]])
    with torch.no_grad():
        logits = theirs(input_ids=tokens).logits
        assert torch.allclose(read.load_emulated(directory)(input_ids=tokens).logits, logits, atol=1e-5)
        monkeypatch.undo()
        assert not torch.allclose(read.load_emulated(directory)(input_ids=tokens).logits, logits, atol=1e-4)


@pytest.mark.parametrize("width", [128, 256, 200, 64, 1])
def test_dynamic_rounding_is_a_scale_a_token_and_128_values(width):
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(width)) * 10
    x[0, 0] = 0
    wanted = torch.empty_like(x)
    for i in range(2):
        for j in range(3):
            for start in range(0, width, 128):
                group = x[i, j, start : start + 128]
                scale = max(float(group.abs().max()), 1e-10) / 448
                wanted[i, j, start : start + 128] = (group / scale).clamp(-448, 448).to(FP8).float() * scale
    assert torch.allclose(read.dynamic_rounding(x), wanted, rtol=1e-6)


def test_linears_that_sglang_fuses_share_the_largest_scale(export_of):
    directory = export_of("qwen3", "fp8")
    stored = load_file(directory / "model.safetensors")
    prefix = "model.layers.0.self_attn."
    scales = {x: stored[f"{prefix}{x}_proj.weight_scale"] for x in "qkv"}
    largest = max(scales.values())
    assert any(scale < largest for scale in scales.values())
    served = dict(read.Fp8Checkpoint(directory).served_weights())
    for x, scale in scales.items():
        weight = stored[f"{prefix}{x}_proj.weight"].float() * scale
        again = (weight / largest).clamp(-448, 448).to(FP8).float() * largest
        assert torch.equal(served[f"{prefix}{x}_proj.weight"], again)


def test_static_rounding_cuts_off_what_calibration_never_saw():
    rounded = read.static_rounding(torch.tensor(0.01))(torch.tensor([100.0, -100.0, 0.01, 0.0]))
    assert torch.allclose(rounded, torch.tensor([4.48, -4.48, 0.01, 0.0]))
