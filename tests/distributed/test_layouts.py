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
EVERYTHING = {
    "algorithm.loss": "gspo_token",
    "algorithm.normalization": "sequence_mean",
    "algorithm.kl_coef": 0.05,
    "algorithm.entropy_coef": 0.01,
    "algorithm.correction": "truncate",
    "algorithm.correction_level": "sequence",
    "stare.gate": "intensity",
    "stare.target_entropy": 3.0,
    "stare.threshold_ema": 0.5,
}
CONTROL = {
    "stare.enabled": False,
    "algorithm.normalization": "dr_grpo",
    "algorithm.entropy_control": "clip_cov",
    "algorithm.control_args": {"fraction": 0.1, "low": 0.0},
}
# Other objectives, each on one process and in a layout that shares tokens out.
OBJECTIVES = {"everything": EVERYTHING, "control": CONTROL}
SHARED = {"parallel.pp": 2, "parallel.distributed_optimizer": True}  # on 4 ranks: two replicas
MOE_LAYOUTS = {
    "moe_dp2": {"parallel.distributed_optimizer": True},
    "moe_pp2": {"parallel.pp": 2},
}
QUADRANTS = ("high_positive", "low_positive", "high_negative", "low_negative")
CASES = [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Records and parameters by layout; the ranks of each world size are started once."""
    root = tmp_path_factory.mktemp("layouts")
    dense, moe = root / "dense", root / "moe"
    write_tiny_checkpoint(dense, layers=4, vocab_size=50)
    write_tiny_checkpoint(moe, architecture="qwen3_moe", layers=4, vocab_size=50, ffn=32)
    extra = {1: {"one": {}, **OBJECTIVES}, 2: {"gate_closed": CLOSED, "stare_off": OFF, "bfloat16": BF16}}
    runs = [(size, dense, extra.get(size, {}) | layouts) for size, layouts in LAYOUTS.items()]
    runs += [(4, dense, {f"{name}_shared": changes | SHARED for name, changes in OBJECTIVES.items()})]
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
    for quantity in ("loss", "grad_norm", "entropy"):
        values = expected[quantity]
        assert record[quantity] == pytest.approx(values, rel=1e-5, abs=1e-7), quantity
    for here, there in zip(record["figures"], expected["figures"], strict=True):
        assert here == pytest.approx(there, rel=1e-4, abs=1e-6)
    assert tensors.keys() == parameters.keys()
    for key, tensor in tensors.items():
        change = (tensor - parameters[key]).norm() / parameters[key].norm()
        assert change <= 1e-5, f"{key}: relative difference {change:.1e}"


@pytest.mark.parametrize("name", MOE_LAYOUTS)
def test_layout_of_experts_equals_one_process(results, name):
    _assert_equal(results[name], results["moe_one"])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_other_objectives_equal_one_process(results, name):
    _assert_equal(results[f"{name}_shared"], results[name])
    assert results[name][0]["loss"] != results["one"][0]["loss"]


def test_three_updates_moved_the_parameters(results):
    record, parameters = results["one"]
    assert len(set(record["loss"])) == 3
    assert all(norm > 0 for norm in record["grad_norm"])
    weight = parameters["model.layers.0.mlp.up_proj.weight"]
    assert weight.std() > 0


def test_closed_gate_is_bit_identical_to_stare_disabled(results):
    (closed, closed_tensors), (off, off_tensors) = results["gate_closed"], results["stare_off"]
    for figures in closed.pop("figures"):
        assert {figures[f"stare/{quadrant}/mean_weight"] for quadrant in QUADRANTS} == {1.0}
    assert closed == {name: values for name, values in off.items() if name != "figures"}
    assert all(torch.equal(tensor, off_tensors[key]) for key, tensor in closed_tensors.items())
    assert closed["loss"] != results["dp2"][0]["loss"], "an open gate must matter in this batch"


def test_bfloat16_is_close_to_float32(results):
    (record, tensors), (expected, _) = results["bfloat16"], results["one"]
    assert record["entropy"] == pytest.approx(expected["entropy"], rel=1e-2)
    assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
