"""A plan agrees with what real runs of small layouts allocate on every rank."""

from __future__ import annotations

import pytest

from megatron_stare.config.schema import Config
from megatron_stare.plan.probe import probe_rank
from megatron_stare.weights import read_hf_config, write_tiny_checkpoint
from tests.support.ranks import run_ranks

LENGTHS, PROMPT = [40, 28, 60], 12
LAYOUTS = {
    "tp2": {"parallel": {"tp": 2, "sequence_parallel": True, "recompute": "full"}},
    "pp2": {"parallel": {"pp": 2}},
    "cp2": {"parallel": {"cp": 2}},
    "dp2": {
        "parallel": {"distributed_optimizer": True, "recompute": "selective"},
        "model": {"dtype": "bfloat16"},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("plan") / "model", layers=6, vocab_size=1000)


@pytest.fixture(scope="module")
def configs(model):
    """Configurations by layout."""
    return {
        name: {
            "model": {"path": str(model), "dtype": "float32", "vocab_multiple": 8, **layout.get("model", {})},
            "parallel": layout["parallel"],
            "task": {"source": "unused.jsonl", "max_prompt_tokens": PROMPT},
        }
        for name, layout in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def ranks(configs):
    """What each rank allocated, by layout."""
    arguments = {"configs": configs, "lengths": LENGTHS, "prompt": PROMPT}
    return run_ranks("tests.plan.measured:each_layout", 2, arguments)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_predicted_bytes_are_those_allocated(ranks, configs, model, layout, rank):
    measured = ranks[rank][layout]
    predicted = probe_rank(
        Config.model_validate(configs[layout]),
        read_hf_config(model),
        world_size=2,
        rank=rank,
        layers="local",
        lengths=LENGTHS,
    )
    assert predicted.stage == measured["stage"]
    found = {name: getattr(predicted, name) for name in ("weights", "gradients", "optimizer")}
    found |= {name: getattr(predicted.passes[0], name) for name in ("saved", "peak")}
    print(layout, rank, {name: (found[name], measured[name]) for name in found})
    for name, size in found.items():
        assert size > 0
        assert size == pytest.approx(measured[name], rel=0.01), name
