"""What the fake ranks of a large run show, checked against arithmetic done by hand."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from megatron_stare.plan.architecture import find_architecture
from megatron_stare.plan.probe import probe_rank
from tests.plan.test_memory import make_config

LENGTHS = [4096, 4096]


def probe(
    model: str,
    world_size: int,
    rank: int = 0,
    layers: str = "transformer_engine",
    lengths=LENGTHS,
    **parallel,
):
    settings = {f"parallel.{key}": value for key, value in parallel.items()}
    config = make_config(**{"model.path": model, **settings})
    return probe_rank(
        config, find_architecture(model).hf, world_size=world_size, rank=rank, layers=layers, lengths=lengths
    )


@pytest.fixture(scope="module")
def rank_of_512():
    return probe(
        "Qwen2.5-32B", 512, tp=8, pp=4, sequence_parallel=True, distributed_optimizer=True, overlap=True
    )


def test_weights_gradients_and_optimizer_of_a_rank_among_512(rank_of_512):
    hidden, ffn, kv, vocabulary = 5120, 27648, 8 * 128, 152_064
    layer = (hidden * (hidden + 2 * kv) + hidden + 2 * kv + hidden * hidden + 3 * hidden * ffn) // 8
    padded = -(-vocabulary // (8 * 128)) * 128  # rows of a rank
    parameters = 16 * (layer + 2 * hidden) + padded * hidden
    assert rank_of_512.parameters == parameters
    assert rank_of_512.weights == pytest.approx(2 * parameters, rel=1e-3)
    assert rank_of_512.gradients == pytest.approx(4 * parameters, rel=1e-3)
    # Float32 weights and two moments, shared by 512 / (8 * 4) replicas.
    assert rank_of_512.optimizer == pytest.approx(12 * parameters / 16, rel=1e-3)


def test_communication_of_a_rank_among_512(rank_of_512):
    # Sequence parallelism: in each layer 2 gathers and 2 scatters forward, 4 and 2 backward, each of the
    # whole microbatch in bf16, of which a rank sends 7 of 8 parts; the embedding scatters and gathers once.
    whole = 8192 * 5120 * 2
    sent = rank_of_512.passes[0].sent
    assert set(sent) == {"TP"}
    assert sent["TP"] == pytest.approx((16 * 10 + 2) * whole * 7 / 8, rel=0.02)
    parameters = rank_of_512.parameters
    assert rank_of_512.update_sent["DP gradients"] == pytest.approx(4 * parameters * 15 / 16, rel=1e-3)
    assert rank_of_512.update_sent["DP parameters"] == pytest.approx(2 * parameters * 15 / 16, rel=1e-3)
    assert rank_of_512.spans == {"TP": 8, "DP": 121, "PP": 385}


def test_recomputation_saves_memory_and_full_saves_a_layers_input_only():
    layout = {"tp": 8, "pp": 4, "sequence_parallel": True}
    found = {
        mode: probe("Qwen2.5-32B", 32, 8, recompute=mode, **layout).passes[0].saved
        for mode in ("none", "selective", "full")
    }
    assert found["full"] < found["selective"] < found["none"]
    inputs = 16 * 8192 // 8 * 5120 * 2
    assert found["full"] == pytest.approx(inputs, rel=0.1)


def test_transformer_engine_layers_keep_no_more_than_local_ones():
    layout = {"tp": 4, "sequence_parallel": True}
    local = probe("Qwen2.5-7B", 4, layers="local", **layout).passes[0]
    engine = probe("Qwen2.5-7B", 4, **layout).passes[0]
    assert engine.saved < local.saved and engine.peak < local.peak


def test_attention_keeps_no_matrix_of_scores():
    halves = probe("Qwen2.5-7B", 1, layers="local").passes[0].saved
    whole = probe("Qwen2.5-7B", 1, layers="local", lengths=[8192]).passes[0].saved
    assert whole == pytest.approx(halves, rel=0.01), "twice the length is not twice the memory a token"


def test_experts_are_shared_out_and_send_tokens():
    layout = {"tp": 4, "sequence_parallel": True, "distributed_optimizer": True, "recompute": "full"}
    rank = probe("Qwen3-30B-A3B", 16, ep=16, **layout)
    whole = find_architecture("Qwen3-30B-A3B")
    experts = 48 * 128 * 3 * 2048 * 768
    dense = whole.parameters - experts
    assert rank.parameters == pytest.approx(experts / 16 + dense / 4, rel=0.02)
    # Every rank sends its quarter of the tokens to 8 experts each and gets them back: forward, once more for
    # the recomputation, and backward; and the router's float32 probabilities.
    tokens = 8192 // 4 * 8 * 15 / 16
    assert rank.passes[0].sent["EP"] == pytest.approx(48 * 6 * tokens * 2048 * 2, rel=0.01)


def test_virtual_stages_are_measured_each():
    rank = probe("Qwen2.5-7B", 4, 3, pp=2, vpp=2, tp=2, sequence_parallel=True)
    first, last = rank.passes
    assert rank.stage == 1
    assert first.output > last.output  # hidden states against two numbers a response token
    assert rank.log_prob > 0 and last.peak > first.peak


def test_context_parallelism_divides_tokens():
    whole = probe("Qwen2.5-7B", 4, tp=2, sequence_parallel=True)
    halves = probe("Qwen2.5-7B", 4, tp=2, cp=2, sequence_parallel=True)
    assert halves.passes[0].saved == pytest.approx(whole.passes[0].saved / 2, rel=0.05)
    # Keys and values are gathered forward, their gradients scattered backward.
    assert halves.passes[0].sent["CP"] == pytest.approx(28 * 2 * 8192 * 2 * (2 * 128) * 2 / 2, rel=0.01)


def test_nothing_is_left_behind():
    environment, factory = dict(os.environ), torch.zeros
    before = dist.new_group, dist.all_gather_object
    probe("Qwen2.5-7B", 2, tp=2)
    assert not dist.is_initialized()
    assert (dist.new_group, dist.all_gather_object) == before
    assert dict(os.environ) == environment and torch.zeros is factory
    assert torch.zeros(2).device.type == "cpu"
