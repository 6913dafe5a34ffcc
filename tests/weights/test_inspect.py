"""What `inspect` says of checkpoints that are sound, and what it finds in those that are not."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

from checkpoints_tools import inspect_checkpoint
from megatron_stare.cli import run
from megatron_stare.errors import UserError
from megatron_stare.weights import write_tiny_checkpoint
from megatron_stare.weights.convert import plan_conversion
from megatron_stare.weights.inspect import inspect

PARAMETERS = 2 * 101 * 64 + 64 + 3 * (2 * 64 + 2 * 16 + 128 * 64 + 64 * 64 + 2 * 128 * 64 + 64 * 128)


@pytest.fixture
def hf(tmp_path):
    return write_tiny_checkpoint(
        tmp_path / "hf", architecture="qwen3", tied=False, vocab_size=101, layers=3, dtype="bfloat16"
    )


@pytest.fixture
def megatron(hf, tmp_path):
    plan_conversion(hf, tmp_path / "step_0000012", vocab_multiple=1).run()
    return tmp_path / "step_0000012"


def problems(path, **options) -> dict[str, str]:
    return {c.name: c.problem for c in inspect(path, **options).checks if c.problem}


def test_a_hugging_face_directory(hf):
    report = inspect(hf, check_values=True)
    assert (report.form, report.architecture, report.step) == ("huggingface", "Qwen3ForCausalLM", None)
    assert (report.parameters, report.weight_bytes) == (PARAMETERS, 2 * PARAMETERS)
    row = next(row for row in report.rows if row.name == "model.layers.[0-2].mlp.up_proj.weight")
    assert (row.shape, row.dtype, row.count) == ([128, 64], "BF16", 3)
    assert len(report.rows) == 3 + 11
    assert report.passed and len(report.checks) == 5


def test_a_megatron_checkpoint(megatron):
    report = inspect(megatron, check_values=True)
    assert (report.form, report.step, report.saved_at_tp) == ("megatron", 12, 1)
    assert (report.parameters, report.weight_bytes) == (PARAMETERS, 2 * PARAMETERS)
    assert report.optimizer_bytes is None
    assert report.disk_bytes == sum(f.stat().st_size for f in megatron.iterdir())
    assert report.passed and len(report.checks) == 5


def test_a_run_directory_is_its_newest_checkpoint(megatron, tmp_path):
    shutil.copytree(megatron, tmp_path / "run/checkpoints/step_0000002")
    shutil.copytree(megatron, tmp_path / "run/checkpoints/step_0000010")
    (tmp_path / "run/checkpoints/step_0000011.tmp").mkdir()
    assert inspect(tmp_path / "run").step == 10


def test_nothing_to_inspect(tmp_path):
    with pytest.raises(UserError, match="neither"):
        inspect(tmp_path)


@pytest.mark.parametrize("kind", ["hf", "megatron"])
def test_numbers_that_are_not_finite_are_found_only_when_asked_for(kind, hf, tmp_path):
    file = hf / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = float("inf")
    tensors["model.layers.1.self_attn.k_proj.weight"][4, 5] = float("nan")
    save_file(tensors, file)
    path = hf
    if kind == "megatron":
        path = tmp_path / "out"
        plan_conversion(hf, path).run()
    assert not problems(path)
    found = problems(path, check_values=True)
    assert list(found) == ["values are finite"]
    assert "has 2 numbers" in found["values are finite"]


def test_truncated_files_are_found(hf, megatron):
    file = megatron / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 10)
    os.truncate(hf / "model.safetensors", 3000)
    assert "truncated" in problems(megatron)["files are whole"]
    assert "incomplete" in problems(hf)["files are whole"]


def test_tensors_of_another_model_are_found(hf, megatron):
    for path in (hf, megatron):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"head_dim": 32}))
        assert "has shape" in problems(path)["tensors fit config.json"]


def test_the_command_prints_names_and_its_exit_code_says_whether_all_is_well(megatron, capsys):
    assert run(["inspect", str(megatron)]) == 0
    shown = capsys.readouterr().out
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in shown
    assert "step 12" in shown and f"{PARAMETERS:,} parameters" in shown
    (megatron / "config.json").unlink()
    assert run([str(megatron), "--json"], inspect_checkpoint.main) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False and report["parameters"] == PARAMETERS


def test_values_are_read_from_every_chunk(megatron):
    read = []
    inspect(megatron, check_values=True, advance=read.append)
    assert sum(read) == 2 * PARAMETERS
