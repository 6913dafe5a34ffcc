"""A run that goes on from a checkpoint does what it would have done, in the same layout and in another."""

from __future__ import annotations

import pytest

from megatron_stare.weights import write_tiny_checkpoint
from tests.support.ranks import run_ranks

TP2, PP2 = {"parallel.tp": 2}, {"parallel.pp": 2}
DISTRIBUTED = {"parallel.distributed_optimizer": True}
SAVED = {"tp2": TP2, "dp2": DISTRIBUTED}
SAME = {"tp2": TP2, "dp2": DISTRIBUTED}
OTHER = {"tp2>pp2": PP2, "dp2>tp2": {**TP2, **DISTRIBUTED}}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    write_tiny_checkpoint(root / "model", layers=2, vocab_size=50)
    arguments = {"model": str(root / "model"), "directory": str(root)}
    saved = run_ranks("tests.distributed.checkpointing:save_and_go_on", 2, {**arguments, "layouts": SAVED})
    layouts = {**SAME, **OTHER}
    loaded = run_ranks("tests.distributed.checkpointing:load_and_go_on", 2, {**arguments, "layouts": layouts})
    return saved[0], loaded[0]


@pytest.mark.parametrize("name", SAME)
def test_same_layout_goes_on_to_the_bit(records, name):
    saved, loaded = records
    assert loaded[name] == saved[name]


@pytest.mark.parametrize("name", OTHER)
def test_another_layout_goes_on_alike(records, name):
    saved, loaded = records
    for mine, expected in zip(loaded[name], saved[name.split(">")[0]], strict=True):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-7)
