"""From groups to shares: advantages, normalisers, nothing lost and nothing counted twice."""

from __future__ import annotations

import pytest
import torch

import megatron_stare.engine  # noqa: F401  (prepares the device before Megatron is imported)
from megatron_stare.config.schema import Config
from megatron_stare.run import policy
from megatron_stare.run.metrics import group_metrics
from megatron_stare.run.stare import Stare
from megatron_stare.tasks.sample import Group, Prompt, Response


def group(rewards: list[float], index: int = 0) -> Group:
    prompt = Prompt(index=index, token_ids=[1, 2], text="12", answer=None)
    responses = [
        Response([3] * (i + 1), [-0.5] * (i + 1), "stop", 0, text=str(i), reward=r)
        for i, r in enumerate(rewards)
    ]
    return Group(prompt, responses)


def test_advantages_compare_responses_to_one_prompt():
    sequences = policy.rl_sequences([group([1.0, 0.0]), group([0.3, 0.3], 1)])
    assert sequences[0].advantage == pytest.approx(-sequences[1].advantage)
    assert sequences[0].advantage > 0
    assert [s.advantage for s in sequences[2:]] == [0.0, 0.0]
    assert sequences[1].token_ids.tolist() == [1, 2, 3, 3]
    assert sequences[1].response_mask.tolist() == [False, False, True, True]
    assert sequences[1].sampler_log_probs.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize(("replicas", "updates"), [(1, 1), (3, 2), (2, 4)])
def test_shares_hold_every_sequence_once_and_count_the_global_tokens(replicas, updates):
    sequences = policy.rl_sequences([group([float(j == i) for j in range(4)], i) for i in range(4)])
    shares = policy.share_out(sequences, replicas=replicas, updates=updates, max_tokens=16)
    held = [s for share in shares for update in share.updates for mb in update for s in mb]
    assert sorted(map(id, held)) == sorted(map(id, sequences))
    for i in range(updates):
        tokens = sum(s.response_tokens for share in shares for mb in share.updates[i] for s in mb)
        assert all(share.normalizers[i] == tokens for share in shares)
    assert all(len(share.updates) == updates for share in shares)


def test_no_gate_where_stare_is_off_or_training_is_supervised():
    values = {"model": {"path": "x"}, "task": {"source": "x.jsonl"}}
    assert Stare.of(Config.model_validate(values)) is not None
    assert Stare.of(Config.model_validate(values | {"stare": {"enabled": False}})) is None
    assert Stare.of(Config.model_validate(values | {"objective": "sft"})) is None


def test_closed_gate_gives_no_weights():
    values = {"model": {"path": "x"}, "task": {"source": "x.jsonl"}, "stare": {"target_entropy": 0.3}}
    gate = Stare.of(Config.model_validate(values)).gate
    assert gate.update(0.5).rule is None
    assert gate.update(0.2).rule is not None


def test_group_metrics_count_distinct_right_answers():
    metrics = group_metrics([group([1.0, 1.0, 0.0]), group([0.0, 0.0, 0.0], 1)])
    assert metrics["reward/mean"] == pytest.approx(1 / 3)
    assert metrics["reward/any_right"] == 0.5
    assert metrics["reward/distinct_right"] == 1.0
    assert metrics["response/length"] == 2.0


def test_sampler_gap_is_zero_for_equal_log_probs():
    from megatron_stare.engine.batch import pack
    from megatron_stare.engine.step import Signals

    mb = pack(policy.rl_sequences([group([1.0, 0.0])]), 16, torch.device("cpu"))
    same = Signals([mb.sampler_log_probs.clone()], [], 0.0, mb.response_tokens)
    off = Signals([mb.sampler_log_probs - 0.25], [], 0.0, mb.response_tokens)
    assert policy.sampler_gap([mb], same).tolist() == [0.0, 0.0]
    assert policy.sampler_gap([mb], off).tolist() == [0.25 * 3, 0.25]
