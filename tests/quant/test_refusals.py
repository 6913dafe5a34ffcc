"""What export refuses, in one line and with nothing left behind."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_stare.cli import app, run
from megatron_stare.errors import UserError
from megatron_stare.quant import export_fp8
from megatron_stare.quant.export import DEFAULT_LIMIT, QUANTISATIONS


def refused(tmp_path: Path, source: Path, message: str, quant: str = "fp8_blockwise", **options) -> None:
    target = tmp_path / "results" / "out"
    with pytest.raises(UserError, match=message) as found:
        export_fp8(source, target, quant, **options)
    assert "\n" not in str(found.value)
    assert not target.parent.exists() or list(target.parent.iterdir()) == []


def test_no_source(tmp_path):
    refused(tmp_path, tmp_path / "nowhere", "nowhere does not exist")


def test_quantised_sources(tmp_path, export_of):
    for quant in ("fp8", "fp8_blockwise"):
        refused(tmp_path, export_of("qwen3", quant), "quantised already .* needs the unquantised weights")


def test_a_megatron_checkpoint(tmp_path):
    source = tmp_path / "step_0000010"
    source.mkdir()
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    refused(tmp_path, source, "step_0000010 is a Megatron checkpoint; .* megatron-stare convert")


def test_a_truncated_source(tmp_path, source_of, copy_of):
    source = copy_of(source_of("qwen3"))
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(tmp_path, source, "model.safetensors is damaged or incomplete")


@pytest.mark.parametrize("quant", ["fp8", "fp8_blockwise"])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.v_proj.weight", "model.norm.weight"])
def test_nan_in_a_weight(quant, name, tmp_path, source_of, copy_of, prompts):
    source = copy_of(source_of("qwen3"))
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[-1] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path, source, f"{name} in .* holds NaN or infinity", quant, calibration=str(prompts))


def test_fp8_without_calibration(tmp_path, source_of):
    refused(tmp_path, source_of("qwen3"), "--quant fp8 needs --calibration: prompts", "fp8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "1="}\n{"prompt": "2=\n', r"data\.jsonl:2: not JSON"),
        ('{"question": "1="}\n', r"data\.jsonl:1: needs one of messages, prompt, text; .* are question"),
        ('{"prompt": 5}\n', r"data\.jsonl:1: 'prompt' must be a string or a list"),
        ('{"text": ""}\n', r"data\.jsonl:1: 'text' must be a string that is not empty"),
        ('{"messages": [{"role": "user", "content": "1="}]}\n', "data.jsonl:1: .* no chat template"),
        ("\n", r"data\.jsonl: no rows"),
        (None, r"--calibration .*data\.jsonl: no such file"),
    ],
)
def test_broken_calibration_data(content, message, tmp_path, source_of):
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content)
    refused(tmp_path, source_of("qwen3"), message, "fp8", calibration=str(data))


def test_calibration_without_a_tokenizer(tmp_path, source_of, copy_of, prompts):
    source = copy_of(source_of("qwen3"))
    for file in source.glob("tokenizer*"):
        file.unlink()
    refused(tmp_path, source, "no tokenizer files", "fp8", calibration=str(prompts))


def test_an_existing_target_is_left_alone(tmp_path, source_of):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(UserError, match="out exists already"):
        export_fp8(source_of("qwen3"), tmp_path / "out", "fp8_blockwise")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["mine"]


def test_impossible_options(tmp_path, source_of, prompts):
    source = source_of("qwen3")
    refused(tmp_path, source, "--quant int4: not known; allowed: fp8, fp8_blockwise", "int4")
    refused(tmp_path, source, "--limit 0", limit=0.0)
    refused(tmp_path, source, "--limit nan", limit=float("nan"))
    refused(tmp_path, source, "--samples 0", "fp8", calibration=str(prompts), samples=0)


@pytest.mark.parametrize("quant", ["fp8", "fp8_blockwise"])
def test_too_little_disk_is_found_before_any_work(quant, tmp_path, source_of, prompts, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 5000, 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = "not enough disk space for .*/out: 0.07 GB are needed, 0.00 GB are free in"
    refused(tmp_path, source_of("qwen3"), message, quant, calibration=str(prompts))
    assert not (tmp_path / "results").exists()


def test_a_target_that_cannot_be_made(tmp_path, source_of):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to .*/file"):
        export_fp8(source_of("qwen3"), tmp_path / "file" / "out", "fp8_blockwise")


def test_the_command_prints_one_line_and_exits_2(tmp_path, source_of, capsys):
    assert run(["export", str(source_of("qwen3")), str(tmp_path / "out"), "--quant", "fp8"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: --quant fp8 needs --calibration")
    assert output.err.count("\n") == 1
    assert run(["export", "a", "b", "--quant", "int4"]) == 2
    assert "'int4' is not one of 'fp8', 'fp8_blockwise'" in capsys.readouterr().err
    assert run(["export", "a", "b"]) == 2
    assert "--quant" in capsys.readouterr().err


def test_the_command_exports(tmp_path, source_of, capsys):
    options = ["--quant", "fp8_blockwise", "--no-verify"]
    assert run(["export", str(source_of("qwen3")), str(tmp_path / "out"), *options]) == 0
    output = capsys.readouterr()
    assert output.err == "" and output.out.splitlines()[1] == "not compared with its source (--no-verify)"
    assert "not checked" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.float8_e4m3fn in {tensor.dtype for tensor in stored.values()}


def test_the_command_offers_what_the_function_takes():
    options = {option.name: option for option in app.commands["export"].params}
    assert tuple(options["quant"].type.choices) == QUANTISATIONS
    assert options["limit"].default == DEFAULT_LIMIT
