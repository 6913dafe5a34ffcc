"""Every layout computes what one process computes: updates of the clipped objective with STARE.

A covering dozen of the layouts that `python -m benchmarks.parity` compares, and other objectives.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.parity_layouts import LAYOUTS, REFERENCES, write_models
from tests.support.ranks import run_ranks

TARGET = "benchmarks.parity_ranks:each_job"
COVERING = (
    *("selective", "tp2_sp_selective", "pp2_vpp2", "cp2", "dp2_distopt_overlap"),
    *("tp2_sp_cp2_selective", "cp2_pp2_padded", "cp2_dp2_distopt_overlap_full", "tp2_sp_pp2"),
    *("moe_ep2", "moe_ep2_tp2_sp", "moe_ep2_cp2_pp2_vpp2", "moe_ep2_tp2_sp_dp2_distopt"),
    "moe_ep2_cp2_balanced",
)
CHOSEN = [layout for layout in LAYOUTS if layout.name in COVERING]
CLOSED = {"stare.gate": "target", "stare.target_entropy": 1e-6}
OFF = {"stare.enabled": False}
BF16 = {"model.dtype": "bfloat16", "parallel.tp": 2, "parallel.distributed_optimizer": True}
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
    "algorithm.loss": "gspo",
    "algorithm.entropy_control": "clip_cov",
    "algorithm.control_args": {"fraction": 0.1, "low": 0.0},
}
# Other objectives, each on one process and in a layout that shares out tokens and the parts of sequences.
OBJECTIVES = {"everything": EVERYTHING, "control": CONTROL}
SHARED = {"parallel.cp": 2, "parallel.distributed_optimizer": True}  # on 4 ranks: two replicas
QUADRANTS = ("high_positive", "low_positive", "high_negative", "low_negative")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Records, gradients and parameters by name; the ranks of each world size are started once."""
    root = tmp_path_factory.mktemp("layouts")
    models = {name: str(path) for name, path in write_models(root / "models").items()}
    jobs: dict[int, list[dict]] = {1: [], 2: [], 4: []}
    for layout in (*REFERENCES, *CHOSEN):
        job = {"name": layout.name, "model": models[layout.model], "changes": layout.changes}
        jobs[layout.ranks].append(job | {"apart": layout.apart})
    others = {2: {"gate_closed": CLOSED, "stare_off": OFF, "bfloat16": BF16}, 1: OBJECTIVES}
    others[4] = {f"{name}_shared": changes | SHARED for name, changes in OBJECTIVES.items()}
    for ranks, wanted in others.items():
        for name, changes in wanted.items():
            jobs[ranks].append({"name": name, "model": models["dense"], "changes": changes})
    found = {}
    for ranks, wanted in jobs.items():
        records = run_ranks(TARGET, ranks, {"jobs": wanted, "out": str(root)}, timeout=400)
        assert all(record == records[0] for record in records), "ranks disagree"
        for name, record in records[0].items():
            found[name] = record, torch.load(root / f"{name}.pt")
    return found


def test_the_dozen_covers_every_kind_of_parallelism():
    assert len(CHOSEN) == len(COVERING)
    kinds = {key for layout in CHOSEN for key in layout.changes}
    sizes = ("tp", "sequence_parallel", "pp", "vpp", "cp", "ep")
    others = ("distributed_optimizer", "overlap", "recompute", "expert_balance")
    assert kinds == {f"parallel.{name}" for name in (*sizes, *others)}
    assert any(layout.apart for layout in CHOSEN)


@pytest.mark.parametrize("layout", CHOSEN, ids=lambda layout: layout.name)
def test_layout_equals_one_process(results, layout):
    record, _ = results[layout.name]
    expected, _ = results[layout.reference]
    assert record["selected"] == expected["selected"]
    assert all(len(tokens) > 20 for tokens in record["selected"])
    for here, there in zip(record["thresholds"], expected["thresholds"], strict=True):
        assert here == pytest.approx(there, rel=1e-5)
    _assert_equal(results[layout.name], results[layout.reference])


def _assert_equal(found, wanted):
    (record, tensors), (expected, there) = found, wanted
    for quantity in ("loss", "grad_norm", "entropy"):
        assert record[quantity] == pytest.approx(expected[quantity], rel=1e-5, abs=1e-7), quantity
    for here, figures in zip(record["figures"], expected["figures"], strict=True):
        assert here == pytest.approx(figures, rel=1e-4, abs=1e-6)
    for kind in ("gradients", "parameters"):
        assert tensors[kind].keys() == there[kind].keys()
        for key, tensor in tensors[kind].items():
            error = (tensor - there[kind][key]).norm() / there[kind][key].norm()
            assert error <= 1e-5, f"{kind} {key}: relative difference {error:.1e}"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_other_objectives_equal_one_process(results, name):
    _assert_equal(results[f"{name}_shared"], results[name])
    assert results[name][0]["loss"] != results["dense_one"][0]["loss"]


def test_updates_moved_the_parameters(results):
    record, tensors = results["dense_one"]
    assert len(set(record["loss"])) == 3
    assert all(norm > 0 for norm in record["grad_norm"])
    assert all(gradient.norm() > 0 for gradient in tensors["gradients"].values())


def test_closed_gate_is_bit_identical_to_stare_disabled(results):
    (closed, closed_tensors), (off, off_tensors) = results["gate_closed"], results["stare_off"]
    for figures in closed["figures"]:
        assert {figures[f"stare/{quadrant}/mean_weight"] for quadrant in QUADRANTS} == {1.0}
    for quantity in ("loss", "grad_norm", "entropy"):
        assert closed[quantity] == off[quantity]
    tensors = closed_tensors["parameters"]
    assert all(torch.equal(x, off_tensors["parameters"][key]) for key, x in tensors.items())
    assert closed["loss"] != results["dp2_distopt_overlap"][0]["loss"], "an open gate must matter here"


def test_bfloat16_is_close_to_float32(results):
    (record, tensors), (expected, _) = results["bfloat16"], results["dense_one"]
    assert record["entropy"] == pytest.approx(expected["entropy"], rel=1e-2)
    assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    assert {tensor.dtype for tensor in tensors["parameters"].values()} == {torch.bfloat16}
