"""The schedule's invariants, and how good schedules are."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.engine.packing import attention_length, plan_update
from megatron_stare.errors import UserError

lengths = st.lists(st.integers(1, 64), min_size=1, max_size=40)


def totals(schedule, size):
    return [sum(size(i) for microbatch in share for i in microbatch) for share in schedule]


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(64, 200), st.integers(1, 3), st.sampled_from([8.0, 1e6]))
def test_every_sequence_is_scheduled_once_within_the_budget_and_evenly(
    lengths, replicas, budget, multiple, attention
):
    schedule = plan_update(lengths, replicas, budget, multiple, attention_length=attention)
    placed = [i for share in schedule for microbatch in share for i in microbatch]
    assert sorted(placed) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in mb) <= budget for share in schedule for mb in share)
    counts = {len(share) for share in schedule}
    assert len(schedule) == replicas
    assert len(counts) == 1
    assert counts.pop() % multiple == 0


@settings(max_examples=50, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(64, 200))
def test_no_more_microbatches_than_first_fit_over_all_replicas(lengths, replicas, budget):
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fit = next((b for b, left in enumerate(room) if left >= length), None)
        if fit is None:
            room.append(budget - length)
        else:
            room[fit] -= length
    assert len(plan_update(lengths, replicas, budget)[0]) <= -(-len(room) // replicas)


def test_schedule_depends_on_lengths_alone():
    sizes = [5, 9, 9, 3, 30, 1, 22, 8]
    assert plan_update(sizes, 3, 32) == plan_update(tuple(sizes), 3, 32)


def test_equal_sequences_make_a_fixed_schedule():
    assert plan_update([4] * 8, 2, 8) == plan_update([4] * 8, 2, 8) == [[[0, 4], [3, 7]], [[1, 5], [2, 6]]]


def test_more_replicas_than_sequences_leave_empty_microbatches():
    assert plan_update([4], 3, 8) == [[[0]], [[]], [[]]]


def test_nothing_to_schedule_is_an_empty_microbatch_each():
    assert plan_update([], 2, 8) == [[[]], [[]]]


def test_a_sequence_above_the_budget_is_refused():
    with pytest.raises(UserError, match="max_tokens_per_microbatch=8: sequence 1 of the step has 9 tokens"):
        plan_update([3, 9], 1, 8)


def test_a_perfect_packing_that_needs_exchanges_is_found():
    # 34 and 34 exist; longest first to the emptiest makes 36 of one, first fit of 34 needs a third.
    sizes = [18, 15, 12, 7, 6, 5, 5]
    assert [sum(sizes[i] for i in mb) for mb in plan_update(sizes, 1, 34)[0]] == [34, 34]


def test_long_sequences_alone_do_not_keep_the_others_from_being_spread():
    sizes = [100] * 3 + [30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15]
    [share] = plan_update(sizes, 1, 100)
    assert len(share) == 7
    assert max(sum(sizes[i] for i in mb) for mb in share if len(mb) > 1) <= 92


@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_full_and_balanced(seed):
    drawn = random.Random(seed)
    sizes = [min(8192, max(1, round(drawn.lognormvariate(7.5, 0.7)))) for _ in range(512)]
    schedule = plan_update(sizes, 8, 16384)
    assert len(schedule[0]) == -(-sum(sizes) // (8 * 16384))
    costs = totals(schedule, lambda i: sizes[i] + sizes[i] ** 2 / 16384)
    assert max(costs) <= 1.01 * sum(costs) / 8


def test_attention_counts_where_microbatches_are_few():
    # One replica with the long sequence and little else: equal in tokens, it would do twice the work.
    sizes = [1000] + [10] * 100
    schedule = plan_update(sizes, 2, 10_000, attention_length=1000.0)
    costs = totals(schedule, lambda i: sizes[i] + sizes[i] ** 2 / 1000)
    assert schedule[0] == [[0]]
    assert costs == [2000.0, pytest.approx(1010.0)]


def test_microbatches_that_run_together_are_alike():
    drawn = random.Random(0)
    sizes = [drawn.randint(10, 1000) for _ in range(200)]
    schedule = plan_update(sizes, 4, 4000, attention_length=500.0)
    costs = [[sum(sizes[i] + sizes[i] ** 2 / 500 for i in mb) for mb in share] for share in schedule]
    assert all(share == sorted(share, reverse=True) for share in costs)


def test_attention_length_equals_a_layer_counted_by_operations():
    model = SimpleNamespace(hidden_size=3584, ffn_size=18944, num_heads=28, num_kv_heads=4, head_dim=128)
    length = attention_length(**vars(model))
    qkv, out = 3584 * (28 + 2 * 4) * 128, 28 * 128 * 3584
    linear = 2 * (qkv + out + 3 * 3584 * 18944) * length
    scores_and_values = 2 * 2 * 28 * 128 * length * length / 2
    assert scores_and_values == pytest.approx(linear)
