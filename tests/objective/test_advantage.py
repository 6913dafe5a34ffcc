from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.objective import grpo_advantages


def test_follows_the_definition() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0, 0.0], [3.0, 1.0, 2.0, 2.0]])
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(grpo_advantages(rewards), expected)
    centred = grpo_advantages(rewards, normalize_std=False)
    torch.testing.assert_close(centred, rewards - rewards.mean(1, keepdim=True))


@settings(max_examples=100, deadline=None)
@given(reward=st.floats(-1e6, 1e6, width=32), n=st.integers(2, 33), normalize=st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, n: int, normalize: bool) -> None:
    advantages = grpo_advantages(torch.full((2, n), reward), normalize)
    assert torch.equal(advantages, torch.zeros(2, n))


def test_rounding_noise_in_equal_rewards_is_no_signal() -> None:
    rewards = torch.tensor([[0.1 + 0.2, 0.3, 0.3, 0.3], [1.0, 1.0 + 1e-16, 1.0, 1.0]], dtype=torch.float64)
    assert rewards[0, 0] != rewards[0, 1]
    assert torch.equal(grpo_advantages(rewards), torch.zeros(2, 4, dtype=torch.float64))
    noisy = torch.tensor([[0.7, 0.7 + 6e-8]])
    assert torch.equal(grpo_advantages(noisy), torch.zeros(1, 2))


def test_a_small_but_real_difference_is_one() -> None:
    (advantages,) = grpo_advantages(torch.tensor([[0.5, 0.501]])).tolist()
    assert advantages == pytest.approx([-0.707, 0.707], abs=2e-3)


def test_groups_do_not_influence_each_other_and_none_is_fine() -> None:
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([grpo_advantages(row[None]) for row in rewards])
    assert torch.equal(grpo_advantages(rewards), alone)
    assert grpo_advantages(torch.empty(0, 8)).shape == (0, 8)


@pytest.mark.parametrize(
    ("dtype", "out"),
    [(torch.int64, torch.float32), (torch.bool, torch.float32), (torch.float64, torch.float64)],
)
def test_dtypes(dtype: torch.dtype, out: torch.dtype) -> None:
    advantages = grpo_advantages(torch.tensor([[0, 1]]).to(dtype))
    assert advantages.dtype == out
    assert advantages[0, 0] < 0 < advantages[0, 1]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (torch.ones(4), "must be"),
        (torch.ones(4, 1), "at least 2"),
        (torch.tensor([[0.0, 1.0], [0.0, math.nan]]), "group 1, response 1 is nan"),
        (torch.tensor([[math.inf, 1.0]]), "group 0, response 0 is inf"),
    ],
)
def test_meaningless_rewards_are_refused(rewards: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo_advantages(rewards)
