"""Hugging Face to Megatron's distributed checkpoints and back: exact, or refused in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_stare.cli import run
from megatron_stare.errors import UserError
from megatron_stare.weights import pieces, write_tiny_checkpoint
from megatron_stare.weights.convert import gigabytes, plan_conversion
from megatron_stare.weights.dcp import read_description
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral")


def convert(source, target, **options):
    plan_conversion(source, target, **options).run()
    return target


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Equal names, dtypes and bits."""
    return one.keys() == two.keys() and all(
        tensor.dtype == two[name].dtype and torch.equal(tensor, two[name]) for name, tensor in one.items()
    )


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A sharded, untied Qwen3 of odd vocabulary; read only."""
    single = write_tiny_checkpoint(
        tmp_path_factory.mktemp("hf") / "m", architecture="qwen3", tied=False, vocab_size=101
    )
    megatron = convert(single, single.with_name("megatron"))
    return convert(megatron, single.with_name("sharded"), max_shard_bytes=100_000)


@pytest.fixture(scope="module")
def megatron(hf):
    """The same in Megatron's format; read only."""
    return convert(hf, hf.with_name("megatron_again"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_exact(family, tied, dtype, tmp_path):
    source = write_tiny_checkpoint(
        tmp_path / "hf", architecture=family, tied=tied, dtype=dtype, vocab_size=250, head_dim=24, layers=3
    )
    convert(source, tmp_path / "megatron", workers=1)
    convert(tmp_path / "megatron", tmp_path / "back", workers=1)
    assert same(tensors(source), tensors(tmp_path / "back"))
    configs = [json.loads((d / "config.json").read_text()) for d in (source, tmp_path / "back")]
    assert configs[0] == configs[1]


def test_several_workers_and_parts_of_a_vocabulary_change_nothing(hf, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2000)
    to_megatron = plan_conversion(hf, tmp_path / "megatron", workers=3)
    assert sum(piece.parts > 1 for piece, _ in to_megatron.plan.items) >= 8
    to_megatron.run()
    assert len(list((tmp_path / "megatron").glob("__[0-9]*.distcp"))) in (1, 2, 3)  # who is fast takes more
    to_hf = plan_conversion(tmp_path / "megatron", tmp_path / "back", workers=3, max_shard_bytes=100_000)
    to_hf.run()
    assert same(tensors(hf), tensors(tmp_path / "back"))
    assert (tmp_path / "back/model.safetensors.index.json").read_text() == (
        hf / "model.safetensors.index.json"
    ).read_text()


def test_dtype_is_cast_and_named_in_config(hf, tmp_path):
    convert(hf, tmp_path / "megatron", dtype=torch.bfloat16)
    assert {t.dtype for t in read_description(tmp_path / "megatron").tensors.values()} == {torch.bfloat16}
    back = convert(tmp_path / "megatron", tmp_path / "back", dtype=torch.float32)
    expected = {name: tensor.bfloat16().float() for name, tensor in tensors(hf).items()}
    assert same(expected, tensors(back))
    assert json.loads((tmp_path / "megatron/config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((back / "config.json").read_text())["dtype"] == "float32"


def test_vocab_multiple_is_the_padding(hf, tmp_path):
    convert(hf, tmp_path / "megatron", vocab_multiple=64)
    stored = read_description(tmp_path / "megatron").tensors
    assert stored["output_layer.weight"].shape == (128, 64)
    assert same(tensors(hf), tensors(convert(tmp_path / "megatron", tmp_path / "back")))


def test_transformers_loads_what_comes_back(megatron, tmp_path):
    from transformers import AutoModelForCausalLM

    back = convert(megatron, tmp_path / "back", max_shard_bytes=100_000)
    _, info = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    assert not any(info.values())


def test_config_from_elsewhere(hf, megatron, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(megatron, bare)
    (bare / "config.json").unlink()
    with pytest.raises(UserError, match="--hf-config"):
        plan_conversion(bare, tmp_path / "out")
    assert same(tensors(hf), tensors(convert(bare, tmp_path / "out", hf_config=hf)))


def test_dry_run_prints_the_plan_and_writes_nothing(hf, tmp_path, capsys):
    assert run(["convert", str(hf), str(tmp_path / "out"), "--dry-run", "--workers", "2"]) == 0
    shown = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in shown and "2 worker processes" in shown
    size = (
        sum(t.numel() * 4 for t in tensors(hf).values()) + 2 * 27 * 64 * 4
    )  # with the vocabularies' padding
    assert gigabytes(size) in shown
    assert not list(tmp_path.iterdir())


# What is wrong, in the source of either kind or in the target; nothing may be left beside it.


def damaged(source: Path, target: Path, change) -> Path:
    shutil.copytree(source, target)
    change(target)
    return target


def shard(directory: Path) -> Path:
    return sorted([*directory.glob("model-*"), *directory.glob("__[0-9]*.distcp")])[-1]


def truncate(directory: Path) -> None:
    os.truncate(shard(directory), shard(directory).stat().st_size - 1000)


def edit_config(**fields):
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | fields))

    return change


def edit_index(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, last = sorted(set(index["weight_map"].values()))[:: len(set(index["weight_map"].values())) - 1]
    index["weight_map"] = {k: last if v == first else v for k, v in index["weight_map"].items()}
    path.write_text(json.dumps(index))


def edit_tensor(name: str, edit):
    def change(directory: Path) -> None:
        for file in directory.glob("*.safetensors"):
            found = load_file(file)
            if name in found:
                save_file(found | {name: edit(found[name])}, file)

    return change


def too_many_tokens(directory: Path) -> None:
    vocabulary = {f"t{i}": i for i in range(102)}
    content = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(content))


def flip_description(directory: Path) -> None:
    path = directory / ".metadata"
    path.write_bytes(path.read_bytes()[:-100])


def overwrite_pieces(directory: Path) -> None:
    path = shard(directory)
    path.write_bytes(b"\0" * path.stat().st_size)


BOTH = {
    "missing shard": (lambda d: shard(d).unlink(), "is missing"),
    "truncated shard": (truncate, "incomplete|truncated"),
    "unknown architecture": (
        edit_config(architectures=["GPT2LMHeadModel"]),
        "GPT2LMHeadModel is not supported",
    ),
    "other shape": (edit_config(intermediate_size=96), "has shape .* config.json asks for"),
    "other depth": (edit_config(num_hidden_layers=3), "lacks|has shape"),
    "too many tokens": (too_many_tokens, "tokenizer.json has token id 101, but .* vocab_size is 101"),
}
HF = {
    "wrong index": (edit_index, "should be in"),
    "other dtype": (edit_tensor("lm_head.weight", lambda t: t.to(torch.int32)), "stored as I32"),
}
MEGATRON = {
    "damaged description": (flip_description, r"\.metadata is damaged"),
    "no description": (lambda d: (d / ".metadata").unlink(), "incomplete Megatron checkpoint"),
    "other format": (
        lambda d: (d / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "'zarr' is not supported",
    ),
    "untied weights for a tied model": (edit_config(tie_word_embeddings=True), "does not use: output_layer"),
    "damaged pieces": (overwrite_pieces, "is damaged at byte"),
}
CASES = [("hf", name, *case) for name, case in (BOTH | HF).items()]
CASES += [("megatron", name, *case) for name, case in (BOTH | MEGATRON).items()]


@pytest.mark.parametrize(("kind", "name", "change", "message"), CASES, ids=[f"{c[0]}, {c[1]}" for c in CASES])
def test_a_bad_source_is_refused_in_one_line(kind, name, change, message, hf, megatron, tmp_path):
    source = damaged({"hf": hf, "megatron": megatron}[kind], tmp_path / "source", change)
    with pytest.raises(UserError, match=message) as caught:
        convert(source, tmp_path / "out", workers=1)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_fewer_tokens_than_rows_are_fine(hf, tmp_path):
    source = damaged(hf, tmp_path / "source", too_many_tokens)
    content = json.loads((source / "tokenizer.json").read_text())
    del content["model"]["vocab"]["t101"]
    (source / "tokenizer.json").write_text(json.dumps(content))
    plan_conversion(source, tmp_path / "out")


def test_an_existing_target_is_refused_and_kept(hf, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        plan_conversion(hf, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_too_little_disk_is_found_before_anything_is_written(hf, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match=r"0\.00 MB free, but out needs"):
        plan_conversion(hf, tmp_path / "not" / "yet" / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", ["nowhere", "."])
def test_a_source_that_is_neither(source, tmp_path):
    with pytest.raises(UserError, match="does not exist|neither a Hugging Face"):
        plan_conversion(tmp_path / source, tmp_path / "out")


def test_a_second_conversion_to_the_same_target_is_refused(hf, tmp_path):
    second = plan_conversion(hf, tmp_path / "out")

    def check(_stage: Path) -> None:
        with pytest.raises(UserError, match="another conversion to .* is running"):
            second.run()

    plan_conversion(hf, tmp_path / "out").run(check=check)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("tool", "kind", "message"),
    [
        ("hf_to_megatron", "megatron", "is a Megatron checkpoint already"),
        ("megatron_to_hf", "hf", "is a Hugging Face checkpoint already"),
    ],
)
def test_the_tools_refuse_the_other_direction(tool, kind, message, hf, megatron, tmp_path, capsys):
    from importlib import import_module

    source = {"hf": hf, "megatron": megatron}[kind]
    command = import_module(f"checkpoints_tools.{tool}").main
    assert run([str(source), str(tmp_path / "out")], command) == 2
    assert message in capsys.readouterr().err


def test_a_failed_check_leaves_nothing(hf, tmp_path):
    seen = []

    def check(stage: Path) -> None:
        seen.append(read_description(stage))
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        plan_conversion(hf, tmp_path / "out").run(check=check)
    assert seen and not list(tmp_path.iterdir())


def test_verification_accepts_what_is_right_and_refuses_what_is_not(hf, megatron, tmp_path):
    found = run_ranks(
        "tests.weights.verifying:verify_all",
        1,
        {"hf": str(hf), "megatron": str(megatron), "directory": str(tmp_path)},
    )[0]
    assert found["to_megatron"].startswith("verified: largest difference of 189 log-probs")
    assert found["to_hf_rounded"].startswith("verified: ")
    assert found["tampered"].startswith("verification failed, nothing was written: ")
    assert "nan" in found["not_a_number"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["to_hf_rounded", "to_megatron"]


def test_a_killed_conversion_leaves_the_target_absent_or_complete(tmp_path):
    source = write_tiny_checkpoint(
        tmp_path / "source", layers=4, hidden=512, heads=8, head_dim=64, ffn=1024, vocab_size=4000
    )
    command = [sys.executable, "-m", "tests.weights.killed_conversions", source, tmp_path, "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout):
        assert found["absent"] + found["complete"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron", "source"]
