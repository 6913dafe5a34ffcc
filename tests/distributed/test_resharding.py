"""A checkpoint saved at TP 2 x PP 2 gives the same log-probs in whatever layout loads it."""

from __future__ import annotations

import pytest

from megatron_stare.weights import write_tiny_checkpoint
from tests.support.ranks import run_ranks

SAVED = {"parallel.tp": 2, "parallel.pp": 2}
EXPERTS = {"parallel.ep": 2, "parallel.sequence_parallel": True}  # what experts need beside TP
LOADED = {
    "qwen3": {
        "tp1": {},
        "tp4": {"parallel.tp": 4},
        "pp4": {"parallel.pp": 4},
        "pp2_vpp2": {"parallel.pp": 2, "parallel.vpp": 2},
    },
    "qwen3_moe": {
        "tp1": {},
        "ep2": {"parallel.ep": 2},
        "tp4_ep4": {"parallel.tp": 4, "parallel.ep": 4, "parallel.sequence_parallel": True},
        "pp2_ep2": {"parallel.pp": 2, "parallel.ep": 2},
    },
}


@pytest.fixture(scope="module", params=LOADED)
def found(request, tmp_path_factory):
    """What rank 0 found, by layout. Loaded over a model with other weights, so that a load is seen."""
    root = tmp_path_factory.mktemp(request.param)
    for seed in (0, 1):
        write_tiny_checkpoint(
            root / str(seed), architecture=request.param, layers=4, kv_heads=4, vocab_size=50, seed=seed
        )
    experts = EXPERTS if "moe" in request.param else {}
    arguments = {
        "model": str(root / "0"),
        "other": str(root / "1"),
        "directory": str(root / "checkpoints"),
        "saved": SAVED | experts,
        "loaded": LOADED[request.param],
    }
    ranks = run_ranks("tests.distributed.checkpointing:reshard", 4, arguments)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


def test_every_layout_gives_the_log_probs_of_the_saved_one(found):
    saved = found.pop("saved")
    assert len(found) == 4
    for layout, log_probs in found.items():
        assert log_probs == pytest.approx(saved, abs=1e-5), layout
