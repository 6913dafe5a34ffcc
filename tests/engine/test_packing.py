"""The schedule's invariants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.engine.packing import plan_update

lengths = st.lists(st.integers(1, 64), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(64, 200), st.integers(1, 3))
def test_every_sequence_is_scheduled_once_within_the_budget_and_evenly(lengths, replicas, budget, multiple):
    schedule = plan_update(lengths, replicas, budget, multiple)
    placed = [i for share in schedule for microbatch in share for i in microbatch]
    assert sorted(placed) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in mb) <= budget for share in schedule for mb in share)
    counts = {len(share) for share in schedule}
    assert len(schedule) == replicas
    assert len(counts) == 1
    assert counts.pop() % multiple == 0


def test_schedule_depends_on_lengths_alone():
    sizes = [5, 9, 9, 3, 30, 1, 22, 8]
    assert plan_update(sizes, 3, 32) == plan_update(list(sizes), 3, 32)


def test_more_replicas_than_sequences_leave_empty_microbatches():
    assert plan_update([4], 3, 8) == [[[0]], [[]], [[]]]


def test_a_sequence_above_the_budget_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens, above max_tokens_per_microbatch=8"):
        plan_update([3, 9], 1, 8)
