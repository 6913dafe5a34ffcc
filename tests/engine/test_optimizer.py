"""The learning-rate schedule."""

from __future__ import annotations

import pytest

from megatron_stare.engine.optimizer import LearningRate


def test_warm_up_starts_above_zero_and_reaches_the_peak():
    rate = LearningRate(peak=1.0, warmup=4, total=10)
    assert [rate(i) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_ends_at_the_floor_and_stays(schedule):
    rate = LearningRate(peak=1.0, floor=0.1, schedule=schedule, total=10)
    values = [rate(i) for i in range(15)]
    assert values[0] == 1.0
    assert values[5] == pytest.approx(0.55)
    assert values[10:] == pytest.approx([0.1] * 5)
    assert values == sorted(values, reverse=True)
