"""Converted checkpoints beside those that Megatron writes, and in Megatron models of every layout."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_stare.errors import UserError
from megatron_stare.weights import write_tiny_checkpoint
from megatron_stare.weights.convert import plan_conversion
from megatron_stare.weights.dcp import read_description
from megatron_stare.weights.inspect import inspect
from megatron_stare.weights.pread import TensorFiles
from tests.support.ranks import run_ranks

CHECKPOINTS = {
    "qwen2_tied": {"architecture": "qwen2"},
    "qwen3_untied_bf16": {"architecture": "qwen3", "tied": False, "dtype": "bfloat16"},
    "qwen3_moe": {"architecture": "qwen3_moe", "tied": False},
}
ONE = {"one": {"tp": 1, "pp": 1}}
TWO = {
    "tp2": {"tp": 2, "pp": 1},
    "pp2": {"tp": 1, "pp": 2},
    "pp2_vpp2": {"tp": 1, "pp": 2, "vpp": 2},
    "ep2": {"tp": 1, "pp": 1, "ep": 2},
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    return {
        name: str(write_tiny_checkpoint(folder / name, layers=4, vocab_size=250, **options))
        for name, options in CHECKPOINTS.items()
    }


@pytest.fixture(scope="module")
def converted(originals, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    for name, path in originals.items():
        plan_conversion(path, folder / name, workers=1).run()
    return {name: str(folder / name) for name in originals}


@pytest.fixture(scope="module")
def ranks(originals, converted, tmp_path_factory):
    """Where Megatron itself saved the originals, and which parameters it did not load right, a rank."""
    saved = tmp_path_factory.mktemp("saved")
    arguments = {"checkpoints": originals, "converted": converted, "saved": str(saved)}
    found = []
    for layouts, number in ((ONE, 1), (TWO, 2)):
        arguments |= {"layouts": layouts, "save": next(iter(layouts))}
        found += [
            (layouts, result)
            for result in run_ranks("tests.weights.dcp_ranks:save_and_load", number, arguments)
        ]
    return saved, found


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_a_converted_checkpoint_is_what_megatron_writes(name, layout, converted, ranks):
    ours, theirs = Path(converted[name]), ranks[0] / name / layout
    one, two = read_description(ours), read_description(theirs)
    assert one.tensors.keys() == two.tensors.keys()
    assert one.objects.keys() >= two.objects.keys()
    for key, tensor in one.tensors.items():
        assert (tensor.shape, tensor.dtype) == (two.tensors[key].shape, two.tensors[key].dtype)
        whole = [
            TensorFiles(folder).box(t.chunks, (0,) * len(t.shape), t.shape, t.dtype)
            for folder, t in ((ours, tensor), (theirs, two.tensors[key]))
        ]
        assert torch.equal(*whole), key


def test_megatron_loads_a_converted_checkpoint_into_every_layout(ranks):
    assert len(ranks[1]) == 3
    for layouts, wrong in ranks[1]:
        assert wrong == {f"{name}/{layout}": [] for name in CHECKPOINTS for layout in layouts}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_training_checkpoint_converts_without_its_optimizer(name, originals, ranks, tmp_path):
    run = ranks[0] / name / "run"
    report = inspect(run, check_values=True)
    assert (report.step, report.saved_at_tp, report.passed) == (7, 2, True)
    assert report.optimizer_bytes >= 2 * report.weight_bytes
    original = load_file(Path(originals[name]) / "model.safetensors")
    plan = plan_conversion(run, tmp_path / "hf")
    assert plan.read_bytes == report.weight_bytes
    plan.run()
    expected = load_file(ranks[0] / name / "exported/model.safetensors")
    assert not torch.equal(*(t["model.embed_tokens.weight"] for t in (expected, original)))
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(t.dtype == found[k].dtype and torch.equal(t, found[k]) for k, t in expected.items())


def test_a_description_that_would_run_code_is_refused(converted, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(next(iter(converted.values())), copy)

    class Evil:
        def __reduce__(self):
            return (print, ("run by a checkpoint",))

    (copy / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"\.metadata is damaged.*builtins\.print"):
        read_description(copy)
