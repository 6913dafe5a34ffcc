"""Advantages other than GRPO's, against loops written from the papers."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.objective import (
    advantages,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
    w_reinforce_advantages,
)

KINDS = ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "w_reinforce"]
rewards_lists = st.integers(2, 6).flatmap(
    lambda n: st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 0.5, -1.0, 2.25]), min_size=n, max_size=n), min_size=1, max_size=5
    )
)


def tensor(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@settings(max_examples=80, deadline=None)
@given(rows=rewards_lists)
def test_rloo_leaves_one_out(rows: list[list[float]]) -> None:
    expected = [[r - statistics.fmean(row[:i] + row[i + 1 :]) for i, r in enumerate(row)] for row in rows]
    torch.testing.assert_close(rloo_advantages(tensor(rows)), tensor(expected), rtol=1e-12, atol=1e-12)


@settings(max_examples=80, deadline=None)
@given(rows=rewards_lists, baseline=st.booleans())
def test_reinforce_pp_normalises_over_the_batch(rows: list[list[float]], baseline: bool) -> None:
    returns = [[r - baseline * statistics.fmean(row) for r in row] for row in rows]
    flat = [x for row in returns for x in row]
    mean, std = statistics.fmean(flat), statistics.stdev(flat)
    expected = [[(x - mean) / (std + 1e-6) for x in row] for row in returns]
    found = reinforce_pp_advantages(tensor(rows), group_baseline=baseline)
    if std > 1e-12:
        torch.testing.assert_close(found, tensor(expected), rtol=1e-9, atol=1e-9)
    else:
        assert torch.equal(found, torch.zeros_like(found))


@settings(max_examples=80, deadline=None)
@given(rows=rewards_lists, seed=st.integers(0, 2**31), baseline=st.booleans())
def test_reinforce_pp_by_tokens_is_the_mean_and_std_over_all_tokens(rows, seed: int, baseline: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (len(rows), len(rows[0])), generator=generator)
    returns = [[r - baseline * statistics.fmean(row) for r in row] for row in rows]
    tokens = [
        x
        for row, ns in zip(returns, lengths.tolist(), strict=True)
        for x, n in zip(row, ns, strict=True)
        for _ in range(n)
    ]
    found = reinforce_pp_advantages(tensor(rows), group_baseline=baseline, lengths=lengths)
    if len(tokens) < 2 or statistics.stdev(tokens) < 1e-12:
        assert torch.equal(found, torch.zeros_like(found))
        return
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    expected = [[(x - mean) / (std + 1e-6) for x in row] for row in returns]
    torch.testing.assert_close(found, tensor(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [[[0.0, 1.0, 1.0]], [[-1.0, 1.0, 1.0]]])
def test_w_reinforce_weighs_right_answers(rows: list[list[float]]) -> None:
    assert w_reinforce_advantages(tensor(rows)).tolist() == [[-1.0, 0.1, 0.1]]
    assert w_reinforce_advantages(tensor(rows), positive_weight=1.0).tolist() == [[-1.0, 1.0, 1.0]]
    assert w_reinforce_advantages(tensor(rows), positive_weight=0.0).tolist() == [[-1.0, 0.0, 0.0]]


def test_one_entry_point_for_all() -> None:
    r = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))
    lengths = torch.arange(32).view(4, 8)
    expected = {
        "grpo": grpo_advantages(r),
        "dr_grpo": grpo_advantages(r, normalize_std=False),
        "rloo": rloo_advantages(r),
        "reinforce_pp": reinforce_pp_advantages(r, lengths=lengths),
        "reinforce_pp_baseline": reinforce_pp_advantages(r, group_baseline=True, lengths=lengths),
        "w_reinforce": w_reinforce_advantages(r, positive_weight=0.3),
    }
    for kind in KINDS:
        assert torch.equal(advantages(kind, r, lengths=lengths, positive_weight=0.3), expected[kind])
    with pytest.raises(ValueError, match="'gae' is none of grpo, dr_grpo"):
        advantages("gae", r)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
@settings(max_examples=30, deadline=None)
@given(reward=st.floats(-1e6, 1e6, width=32), n=st.integers(2, 17))
def test_a_group_of_equal_rewards_gives_exactly_zero(kind: str, reward: float, n: int) -> None:
    others = torch.rand(3, n, generator=torch.Generator().manual_seed(n))
    found = advantages(kind, torch.cat([torch.full((1, n), reward), others]))
    assert torch.equal(found[0], torch.zeros(n))
    assert found[1:].abs().min() > 0


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("lengths", [None, torch.tensor([[3, 1], [0, 5]])])
def test_equal_rewards_in_the_whole_batch_give_exactly_zero(kind: str, lengths) -> None:
    r = torch.tensor([[0.1 + 0.2, 0.3], [0.3, 0.3]], dtype=torch.float64)
    assert torch.equal(advantages(kind, r, lengths=lengths), torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_shapes_and_an_empty_batch(kind: str) -> None:
    assert advantages(kind, torch.tensor([[0, 1], [1, 1]])).dtype == torch.float32
    assert advantages(kind, torch.tensor([[0.0, 1.0]], dtype=torch.float64)).dtype == torch.float64
    assert advantages(kind, torch.empty(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (torch.ones(4), "must be"),
        (torch.tensor([[0.0, math.nan]]), "group 0, response 1 is nan"),
        (torch.ones(4, 0), "0 responses a group: at least"),
    ],
)
def test_meaningless_rewards_are_refused_by_every_estimator(kind, rewards, message) -> None:
    with pytest.raises(ValueError, match=message):
        advantages(kind, rewards)


def test_one_response_a_group_is_enough_where_nothing_is_compared_with_its_group() -> None:
    r = torch.tensor([[0.0], [1.0]])
    assert w_reinforce_advantages(r).flatten().tolist() == pytest.approx([-1.0, 0.1])
    assert reinforce_pp_advantages(r).flatten().tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    for kind in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"):
        with pytest.raises(ValueError, match="at least 2"):
            advantages(kind, r)


def test_wrong_options_are_refused() -> None:
    r = torch.ones(2, 2)
    with pytest.raises(ValueError, match="positive_weight=-1"):
        w_reinforce_advantages(r, positive_weight=-1)
    with pytest.raises(ValueError, match="lengths has shape"):
        reinforce_pp_advantages(r, lengths=torch.ones(3))
    with pytest.raises(ValueError, match="length is -2"):
        reinforce_pp_advantages(r, lengths=torch.tensor([[1, 1], [1, -2]]))
