"""Directories of weights are complete or absent, and ordinary checkpoints."""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_stare.errors import UserError
from megatron_stare.weights import save_hf, staged_directory, write_tiny_checkpoint


@pytest.fixture
def source(tmp_path):
    directory = write_tiny_checkpoint(tmp_path / "source", eos_token_id=7)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "reference.pt").write_text("not part of a checkpoint")
    return directory


def test_small_model_is_one_file_with_config_and_tokenizer(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    assert save_hf(tmp_path / "out", ((n, t.to(torch.bfloat16)) for n, t in tensors.items()), source)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {**json.loads((source / "config.json").read_text()), "dtype": "bfloat16"}
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(back[n], t.to(torch.bfloat16)) for n, t in tensors.items())


def test_shards_stay_under_the_limit_and_transformers_reads_them(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    save_hf(tmp_path / "out", tensors.items(), source, max_shard_bytes=50_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    for file in files:
        assert sum(t.numel() * t.element_size() for t in load_file(file).values()) <= 50_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(model.state_dict()[n], t) for n, t in tensors.items())


def test_files_can_be_read_by_others(source, tmp_path):
    save_hf(tmp_path / "out", load_file(source / "model.safetensors").items(), source)
    mask = os.umask(0)
    os.umask(mask)
    for path in (tmp_path / "out", *(tmp_path / "out").iterdir()):
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_an_existing_directory_is_never_overwritten(source, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out exists already"):
        save_hf(tmp_path / "out", iter([("a", torch.ones(1))]), source)
    with pytest.raises(UserError, match="source exists already"):
        write_tiny_checkpoint(source)


def test_a_failure_half_way_leaves_nothing(source, tmp_path):
    def broken():
        yield "a", torch.ones(1000)
        yield "b", torch.ones(1000)
        raise RuntimeError("lost a rank")

    with pytest.raises(RuntimeError, match="lost a rank"):
        save_hf(tmp_path / "out", broken(), source, max_shard_bytes=10)
    assert os.listdir(tmp_path) == ["source"]


def test_the_name_appears_only_when_all_is_written(tmp_path):
    with staged_directory(tmp_path / "deep" / "out") as stage:
        (stage / "file").write_text("x")
        assert not (tmp_path / "deep" / "out").exists()
    assert os.listdir(tmp_path / "deep") == ["out"]


def test_ranks_without_tensors_take_part_and_write_nothing(source, tmp_path):
    taken = []

    def others():
        for name in "abc":
            taken.append(name)
            yield name, None

    assert save_hf(tmp_path / "out", others(), source) is False
    assert save_hf(tmp_path / "out", iter(()), source) is False
    assert taken == ["a", "b", "c"]
    assert os.listdir(tmp_path) == ["source"]


def test_a_source_without_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        save_hf(tmp_path / "out", iter([("a", torch.ones(1))]), tmp_path)


def test_a_place_that_cannot_be_written_is_a_clear_error(source, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        save_hf(tmp_path / "file" / "out", iter([("a", torch.ones(1))]), source)
