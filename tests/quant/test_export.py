"""Exports of tiny models of each family: names, config, values, and what transformers reads from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_stare.quant import export_fp8, quantize_blockwise
from megatron_stare.quant.check import check_tensors
from megatron_stare.quant.read import Fp8Checkpoint
from megatron_stare.quant.source import open_checkpoint
from megatron_stare.quant.write import blockwise_bytes, write_blockwise

FAMILIES = ["qwen2", "qwen3", "llama", "mistral", "qwen3_moe"]
CALIBRATED = ["qwen2", "qwen3", "llama", "qwen3_moe"]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LINEARS


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_blockwise_holds_each_linear_with_its_scales_and_the_rest_as_it_was(family, source_of, export_of):
    source = load_file(source_of(family) / "model.safetensors")
    stored = load_file(export_of(family, "fp8_blockwise") / "model.safetensors")
    linears = {name for name in source if is_linear(name)}
    assert len(linears) >= 14
    assert set(stored) == set(source) | {f"{name}_scale_inv" for name in linears}
    for name, tensor in source.items():
        if name in linears:
            values, scales = quantize_blockwise(tensor)
            assert torch.equal(stored[name].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(stored[f"{name}_scale_inv"], scales)
        else:
            assert stored[name].dtype == torch.bfloat16 and torch.equal(stored[name], tensor)


@pytest.mark.parametrize("family", FAMILIES)
def test_blockwise_config_is_the_published_one(family, source_of, export_of):
    config = config_of(export_of(family, "fp8_blockwise"))
    quantisation = config.pop("quantization_config")
    routers = [f"model.layers.{i}.mlp.gate" for i in range(2)] if family == "qwen3_moe" else []
    assert quantisation == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *routers],
    }
    assert config == config_of(source_of(family))


@pytest.mark.parametrize("family", CALIBRATED)
def test_modelopt_holds_each_linear_with_two_scales_and_the_rest_as_it_was(family, source_of, export_of):
    directory = export_of(family, "fp8")
    source = load_file(source_of(family) / "model.safetensors")
    stored = load_file(directory / "model.safetensors")
    linears = {name for name in source if is_linear(name)}
    scales = {
        name.removesuffix("weight") + kind for name in linears for kind in ("weight_scale", "input_scale")
    }
    assert set(stored) == set(source) | scales
    for name, tensor in source.items():
        if name in linears:
            scale = stored[name.removesuffix("weight") + "weight_scale"]
            assert stored[name].dtype == torch.float8_e4m3fn
            # ModelOpt gives an expert's gate and up the larger of their two scales.
            pair = [name.replace("gate_proj", "up_proj"), name.replace("up_proj", "gate_proj")]
            tensors = [source[other] for other in pair] if ".experts." in name else [tensor]
            assert torch.allclose(scale, max(t.abs().max().float() for t in tensors) / 448)
        else:
            assert torch.equal(stored[name], tensor)
    quantisation = config_of(directory)["quantization_config"]
    assert (quantisation["quant_method"], quantisation["quant_algo"]) == ("modelopt", "FP8")


def test_modelopt_leaves_megatron_alone(export_of):
    export_of("qwen3", "fp8")
    assert "modelopt.torch.quantization" in sys.modules
    assert "modelopt.torch.quantization.plugins.megatron" not in sys.modules
    import megatron.core

    assert sys.modules["megatron.core"] is megatron.core


@pytest.mark.parametrize("quant", ["fp8", "fp8_blockwise"])
def test_tokenizer_and_card_come_along(quant, source_of, export_of):
    directory = export_of("qwen3", quant)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (directory / name).read_bytes() == (source_of("qwen3") / name).read_bytes()
    card = (directory / "README.md").read_text()
    assert card.startswith(f"# qwen3, {quant}\n")
    assert "mean difference 0.0" in card and "largest 0." in card
    assert ("10 rows" in card or "8 rows" in card) == (quant == "fp8")
    assert str(directory.parent) not in card


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_transformers_own_loader_reads_the_same_weights(family, export_of):
    import transformers

    directory = export_of(family, "fp8_blockwise")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )
    theirs = model.state_dict()
    for name, tensor in Fp8Checkpoint(directory).served_weights():
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            number, kind, _ = rest.split(".")
            fused = "down_proj" if kind == "down_proj" else "gate_up_proj"
            found = theirs[f"{layer}.experts.{fused}"][int(number)]
            if kind != "down_proj":
                found = found.chunk(2)[kind == "up_proj"]
        else:
            found = theirs[name]
        assert torch.equal(found, tensor), name


def test_float32_sources_are_rounded_from_what_they_hold(tmp_path, make_source):
    source = make_source("llama", dtype="float32", hidden=192, head_dim=48, ffn=160, kv_heads=1, tied=False)
    export_fp8(source, tmp_path / "out", "fp8_blockwise")
    original, stored = (load_file(d / "model.safetensors") for d in (source, tmp_path / "out"))
    name = "model.layers.1.mlp.down_proj.weight"
    assert stored[name].shape == (192, 160) and stored[f"{name}_scale_inv"].shape == (2, 2)
    assert torch.equal(stored[f"{name}_scale_inv"], quantize_blockwise(original[name])[1])
    assert torch.equal(stored["lm_head.weight"], original["lm_head.weight"].bfloat16())
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"


def test_many_files_with_an_index(tmp_path, source_of):
    source = open_checkpoint(source_of("qwen3_moe"))
    written = []
    write_blockwise(source, tmp_path, written.append, max_shard_bytes=200_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == {f.name for f in files}
    assert index["metadata"]["total_size"] == sum(written) == blockwise_bytes(source)
    check_tensors(source, tmp_path)


def test_what_sglang_refuses_is_said(tmp_path, make_source, capsys):
    source = make_source("qwen3", hidden=192, head_dim=48)
    export_fp8(source, tmp_path / "out", "fp8_blockwise", verify=False)
    error = capsys.readouterr().err
    assert error.startswith("warning: SGLang") and error.count("\n") == 1
    assert "hidden size 192" in error and "key rows 96" in error
    assert "refuses" in (tmp_path / "out" / "README.md").read_text()


def test_the_console_stays_clean(tmp_path, source_of, prompts):
    import subprocess

    line = [sys.executable, "-m", "megatron_stare", "export", source_of("qwen2"), tmp_path / "out"]
    line += ["--quant", "fp8", "--calibration", prompts]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith(f"wrote {tmp_path / 'out'}: ") and "of bfloat16" in first
    assert second.startswith("log-probs against the source over ")
