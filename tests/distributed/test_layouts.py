"""Every layout computes what one process computes: three updates of the clipped objective with STARE."""

from __future__ import annotations

import pytest
import torch

from megatron_stare.weights import write_tiny_checkpoint
from tests.support.ranks import run_ranks

TARGET = "tests.distributed.three_steps:each_layout"
CLOSED = {"stare.gate": "target", "stare.target_entropy": 1e-6}
OFF = {"stare.enabled": False}
BF16 = {"model.dtype": "bfloat16", "parallel.tp": 2, "parallel.distributed_optimizer": True}
LAYOUTS = {
    1: {"recompute": {"parallel.recompute": "full"}},
    2: {
        "tp2": {"parallel.tp": 2},
        "tp2_sequence_parallel": {"parallel.tp": 2, "parallel.sequence_parallel": True},
        "pp2": {"parallel.pp": 2},
        "pp2_vpp2": {"parallel.pp": 2, "parallel.vpp": 2},
        "dp2": {},
        "dp2_overlap": {"parallel.overlap": True},
        "dp2_distributed_optimizer": {"parallel.distributed_optimizer": True},
    },
    4: {
        "tp2_pp2": {"parallel.tp": 2, "parallel.pp": 2},
        "tp2_dp2_distributed_optimizer": {"parallel.tp": 2, "parallel.distributed_optimizer": True},
    },
}
MOE_LAYOUTS = {
    "moe_dp2": {"parallel.distributed_optimizer": True},
    "moe_pp2": {"parallel.pp": 2},
}
CASES = [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Records and parameters by layout; the ranks of each world size are started once."""
    root = tmp_path_factory.mktemp("layouts")
    dense, moe = root / "dense", root / "moe"
    write_tiny_checkpoint(dense, layers=4, vocab_size=50)
    write_tiny_checkpoint(moe, architecture="qwen3_moe", layers=4, vocab_size=50, ffn=32)
    extra = {1: {"one": {}}, 2: {"gate_closed": CLOSED, "stare_off": OFF, "bfloat16": BF16}}
    runs = [(size, dense, extra.get(size, {}) | layouts) for size, layouts in LAYOUTS.items()]
    runs += [(1, moe, {"moe_one": {}}), (2, moe, MOE_LAYOUTS)]
    found = {}
    for world_size, model, wanted in runs:
        arguments = {"model": str(model), "out": str(root), "layouts": wanted}
        ranks = run_ranks(TARGET, world_size, arguments)
        assert all(record == ranks[0] for record in ranks), "ranks disagree on a loss, norm or entropy"
        for name in wanted:
            found[name] = ranks[0][name], torch.load(root / f"{name}.pt")
    return found


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_layout_equals_one_process(results, ranks, name):
    _assert_equal(results[name], results["one"])


def _assert_equal(found, wanted):
    (record, tensors), (expected, parameters) = found, wanted
    for quantity, values in expected.items():
        assert record[quantity] == pytest.approx(values, rel=1e-5, abs=1e-7), quantity
    assert tensors.keys() == parameters.keys()
    for key, tensor in tensors.items():
        change = (tensor - parameters[key]).norm() / parameters[key].norm()
        assert change <= 1e-5, f"{key}: relative difference {change:.1e}"


@pytest.mark.parametrize("name", MOE_LAYOUTS)
def test_layout_of_experts_equals_one_process(results, name):
    _assert_equal(results[name], results["moe_one"])


def test_three_updates_moved_the_parameters(results):
    record, parameters = results["one"]
    assert len(set(record["loss"])) == 3
    assert all(norm > 0 for norm in record["grad_norm"])
    weight = parameters["model.layers.0.mlp.up_proj.weight"]
    assert weight.std() > 0


def test_closed_gate_is_bit_identical_to_stare_disabled(results):
    (closed, closed_tensors), (off, off_tensors) = results["gate_closed"], results["stare_off"]
    assert closed == off
    assert all(torch.equal(tensor, off_tensors[key]) for key, tensor in closed_tensors.items())
    assert closed != results["dp2"][0], "an open gate must matter in this batch"


def test_bfloat16_is_close_to_float32(results):
    (record, tensors), (expected, _) = results["bfloat16"], results["one"]
    assert record["entropy"] == pytest.approx(expected["entropy"], rel=1e-2)
    assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
