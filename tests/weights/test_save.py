"""Ranks together write an ordinary checkpoint, complete or not at all."""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_stare.errors import UserError
from megatron_stare.weights import staged_directory, write_tiny_checkpoint
from tests.support.ranks import run_ranks

WORLDS = {"one process": (1, {"tp": 1, "pp": 1}), "tp2_pp2": (4, {"tp": 2, "pp": 2})}


@pytest.fixture(scope="module", params=WORLDS)
def saved(request, tmp_path_factory):
    """(root, what each rank saw) of several saves by the same ranks."""
    root = tmp_path_factory.mktemp("saves")
    source = write_tiny_checkpoint(root / "source", layers=4, vocab_size=250, eos_token_id=7)
    (source / "tokenizer.json").write_text("{}")
    (source / "reference.pt").write_text("not part of a checkpoint")
    (root / "a_file").write_text("x")
    ranks, world = WORLDS[request.param]
    arguments = {"source": str(source), "root": str(root), "world": world}
    return root, run_ranks("tests.weights.megatron_ranks:saves", ranks, arguments)


def test_small_model_is_one_file_with_config_tokenizer_and_card(saved):
    root, ranks = saved
    assert {rank["one_file"] for rank in ranks} == {"saved"}
    assert sorted(os.listdir(root / "one_file")) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    source = load_file(root / "source" / "model.safetensors")
    back = load_file(root / "one_file" / "model.safetensors")
    assert back.keys() == source.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in source.items())


def test_shards_stay_under_the_limit_and_transformers_reads_them(saved):
    root, ranks = saved
    assert {rank["sharded"] for rank in ranks} == {"saved"}
    files = sorted((root / "sharded").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 50_000
    index = json.loads((root / "sharded" / "model.safetensors.index.json").read_text())
    source = load_file(root / "source" / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in source.values()) / 2
    config = json.loads((root / "sharded" / "config.json").read_text())
    assert config == {**json.loads((root / "source" / "config.json").read_text()), "dtype": "bfloat16"}
    weights = AutoModelForCausalLM.from_pretrained(root / "sharded").state_dict()
    assert all(torch.equal(weights[name], tensor.to(torch.bfloat16)) for name, tensor in source.items())


def test_files_can_be_read_by_others(saved):
    root, _ = saved
    mask = os.umask(0)
    os.umask(mask)
    for path in (root / "sharded", *(root / "sharded").iterdir()):
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("existing", "one_file exists already"),
        ("no_config", "has no config.json to go with the weights"),
        ("no_room", "cannot write"),
        ("disk_full", "File too large"),
    ],
)
def test_a_failure_on_one_rank_is_told_to_all_and_leaves_nothing(saved, case, message):
    root, ranks = saved
    told = {rank[case] for rank in ranks}
    assert len(told) == 1
    assert message in told.pop()
    assert sorted(os.listdir(root)) == ["a_file", "one_file", "sharded", "source"]


def test_the_name_appears_only_when_all_is_written(tmp_path):
    with staged_directory(tmp_path / "deep" / "out") as stage:
        (stage / "file").write_text("x")
        assert not (tmp_path / "deep" / "out").exists()
    assert os.listdir(tmp_path / "deep") == ["out"]


def test_an_existing_directory_is_never_overwritten(tmp_path):
    write_tiny_checkpoint(tmp_path / "source")
    with pytest.raises(UserError, match="source exists already"):
        write_tiny_checkpoint(tmp_path / "source")


def test_an_error_in_the_block_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="half way"), staged_directory(tmp_path / "out") as stage:
        (stage / "file").write_text("x")
        raise RuntimeError("half way")
    assert os.listdir(tmp_path) == []
