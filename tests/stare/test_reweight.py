from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.stare import ReweightRule, surprisal_thresholds, token_weights, weight_sums

RULES = {
    "o1": ReweightRule.o1(1.3, 0.2),
    "c2": ReweightRule.c2(1.3, 0.6, 0.2),
    "four_quadrant": ReweightRule.four_quadrant(M_low=0.8, M=0.7, top_fraction=0.2),
    "custom": ReweightRule.custom(
        high_positive=1.5, low_positive=0.9, high_negative=0.5, low_negative=1.2, top_fraction=0.3, pool="all"
    ),
}


def naive_weights(surprisal, advantage, mask, rule: ReweightRule) -> list[float]:
    """The definition, token by token, in Python."""
    s, a, m = (tensor.flatten().tolist() for tensor in (surprisal, advantage, mask))
    weights = [1.0] * len(s)
    for sign, high, low in (
        (1, rule.high_positive, rule.low_positive),
        (-1, rule.high_negative, rule.low_negative),
    ):
        pool = [i for i in range(len(s)) if m[i] and (rule.pool == "all" or a[i] * sign > 0)]
        if not pool:
            continue
        k = max(1, math.ceil(round(rule.top_fraction * len(pool), 9)))
        limit = sorted((s[i] for i in pool), reverse=True)[k - 1]
        above = sum(s[i] > limit for i in pool)
        tied = sum(s[i] == limit for i in pool)
        for i in pool:
            if a[i] * sign > 0:
                share = 1.0 if s[i] > limit else (k - above) / tied if s[i] == limit else 0.0
                weights[i] = low + (high - low) * share
    return weights


def random_batch(seed: int, shape: tuple[int, ...], ties: bool = False):
    generator = torch.Generator().manual_seed(seed)
    surprisal = -torch.rand(shape, generator=generator).log()
    if ties:
        surprisal = (surprisal * 3).round() / 3
    advantage = torch.randint(-2, 3, shape, generator=generator).float()
    mask = torch.rand(shape, generator=generator) < 0.8
    return surprisal, advantage, mask


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(0, 5), columns=st.integers(0, 12), ties=st.booleans())
def test_weights_follow_the_definition(rule, seed: int, rows: int, columns: int, ties: bool) -> None:
    surprisal, advantage, mask = random_batch(seed, (rows, columns), ties)
    weights = token_weights(surprisal, advantage, mask, rule)
    assert weights.shape == surprisal.shape
    assert weights.dtype == torch.float32
    expected = torch.tensor(naive_weights(surprisal, advantage, mask, rule)).view_as(weights)
    torch.testing.assert_close(weights, expected, rtol=1e-7, atol=0)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 60), P=st.sampled_from([0.001, 0.1, 0.25, 0.5, 1.0]))
def test_ties_keep_the_total_weight_of_an_untied_selection(seed: int, n: int, P: float) -> None:
    surprisal, _, _ = random_batch(seed, (n,), ties=True)
    ones = torch.ones(n)
    weights = token_weights(surprisal, ones, ones, ReweightRule.o1(1.5, P))
    untied = token_weights(torch.arange(1.0, n + 1), ones, ones, ReweightRule.o1(1.5, P))
    assert weights.double().sum().item() == pytest.approx(untied.double().sum().item(), rel=1e-6)


def test_ties_share_the_places_left() -> None:
    surprisal = torch.tensor([5.0, 2.0, 2.0, 2.0, 1.0])
    ones = torch.ones(5)
    # Two places: one for 5.0, one for three tokens.
    weights = token_weights(surprisal, ones, ones, ReweightRule.o1(1.9, 0.4))
    torch.testing.assert_close(weights, torch.tensor([1.9, 1.3, 1.3, 1.3, 1.0]))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_order_does_not_matter(rule) -> None:
    surprisal, advantage, mask = random_batch(3, (200,), ties=True)
    weights = token_weights(surprisal, advantage, mask, rule)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    assert torch.equal(token_weights(surprisal[order], advantage[order], mask[order], rule), weights[order])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_microbatches_with_the_step_s_thresholds_equal_the_whole_batch(rule) -> None:
    surprisal, advantage, mask = random_batch(4, (12, 30), ties=True)
    whole = token_weights(surprisal, advantage, mask, rule)
    thresholds = surprisal_thresholds(surprisal, advantage, mask, rule)
    rows = [slice(0, 1), slice(1, 1), slice(1, 7), slice(7, 12)]
    parts = [token_weights(surprisal[r], advantage[r], mask[r], rule, thresholds=thresholds) for r in rows]
    assert torch.equal(torch.cat(parts), whole)


def test_what_the_mask_hides_does_not_matter() -> None:
    surprisal, advantage, mask = random_batch(5, (8, 20))
    weights = token_weights(surprisal, advantage, mask, RULES["custom"])
    surprisal[~mask] = math.nan
    advantage[~mask] = math.inf
    assert torch.equal(token_weights(surprisal, advantage, mask.long(), RULES["custom"]), weights)
    assert (weights[~mask] == 1).all()
    assert (weights[mask & (advantage == 0)] == 1).all()


@pytest.mark.parametrize(
    ("P", "n", "k"),
    [(0.1, 30, 3), (0.1, 31, 4), (0.07, 100, 7), (0.07, 101, 8), (0.001, 5, 1), (1.0, 9, 9), (0.0, 9, 0),
     (1 / 3, 3, 1), (1e-12, 4, 1), (0.29, 100, 29), (0.1, 0, 0)],
)  # fmt: skip
def test_k_is_the_ceiling_of_the_written_fraction(P: float, n: int, k: int) -> None:
    surprisal = torch.arange(1.0, n + 1)
    ones = torch.ones(n)
    thresholds = surprisal_thresholds(surprisal, ones, ones, ReweightRule.o1(2.0, P))
    assert thresholds.k.tolist() == [k, 0]
    weights = token_weights(surprisal, ones, ones, ReweightRule.o1(2.0, P))
    assert (weights == 2).sum() == k


def test_infinite_surprisal_is_the_highest() -> None:
    surprisal = torch.tensor([math.inf, 1.0, 2.0, 0.5])
    ones = torch.ones(4)
    weights = token_weights(surprisal, ones, ones, ReweightRule.o1(2.0, 0.25))
    assert weights.tolist() == [2.0, 1.0, 1.0, 1.0]
    assert token_weights(surprisal, ones, ones, ReweightRule.o1(2.0, 0.0)).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (0, math.nan, "surprisal is NaN at 1 tokens"),
        (0, -math.inf, "surprisal is below 0 at 1 tokens"),
        (0, -0.1, "surprisal is below 0 at 1 tokens"),
        (1, math.nan, "advantage is not finite at 1 tokens"),
        (1, math.inf, "advantage is not finite at 1 tokens"),
    ],
)
@pytest.mark.parametrize("zero_advantage", [False, True])
def test_faults_are_refused_by_name(field: int, value: float, message: str, zero_advantage: bool) -> None:
    batch = [torch.ones(4), torch.zeros(4) if zero_advantage else torch.ones(4), torch.ones(4)]
    batch[field][2] = value
    with pytest.raises(ValueError, match=message):
        token_weights(*batch, ReweightRule.o1())


def test_unequal_shapes_and_foreign_thresholds_are_refused() -> None:
    batch = [torch.ones(4), torch.ones(4), torch.ones(4)]
    with pytest.raises(ValueError, match="shapes differ"):
        token_weights(batch[0], batch[1][:3], batch[2], ReweightRule.o1())
    thresholds = surprisal_thresholds(*batch, ReweightRule.o1(top_fraction=0.2))
    with pytest.raises(ValueError, match="thresholds are for"):
        token_weights(*batch, ReweightRule.o1(top_fraction=0.1), thresholds=thresholds)
    # Another strength is no other selection.
    token_weights(*batch, ReweightRule.o1(W=3.0, top_fraction=0.2), thresholds=thresholds)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReweightRule.o1(W=0.0), "high_positive=0.0"),
        (lambda: ReweightRule.c2(M=-0.1), "high_negative=-0.1"),
        (lambda: ReweightRule.custom(low_negative=math.nan), "low_negative=nan"),
        (lambda: ReweightRule.custom(low_positive=math.inf), "low_positive=inf"),
        (lambda: ReweightRule.o1(top_fraction=1.5), "top_fraction=1.5"),
        (lambda: ReweightRule.o1(top_fraction=math.nan), "top_fraction=nan"),
        (lambda: ReweightRule.custom(pool="rank"), "pool='rank'"),
        (lambda: RULES["four_quadrant"].with_strength(1.1, 0.9), "four_quadrant"),
    ],
)
def test_impossible_rules_are_refused_by_name(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_rules_put_their_weights_in_the_published_quadrants() -> None:
    def quadrants(rule: ReweightRule) -> tuple[float, ...]:
        return (rule.high_positive, rule.low_positive, rule.high_negative, rule.low_negative)

    assert quadrants(ReweightRule.o1(1.2)) == (1.2, 1, 1, 1)
    assert quadrants(ReweightRule.c2(1.2, 0.8)) == (1.2, 1, 0.8, 1)
    assert quadrants(ReweightRule.four_quadrant(M_low=0.7, M=0.8)) == (1, 0.7, 0.8, 1)
    assert ReweightRule.four_quadrant(M_low=0.7, M=0.8).pool == "all"
    assert ReweightRule.o1(1.0).is_identity and not ReweightRule.c2(1.0, 0.9).is_identity


def test_sums_add_up_over_microbatches_and_ignore_the_mask_s_outside() -> None:
    surprisal, advantage, mask = random_batch(6, (10, 20))
    weights = token_weights(surprisal, advantage, mask, RULES["c2"])
    whole = weight_sums(weights, advantage, mask)
    parts = [weight_sums(weights[r], advantage[r], mask[r]) for r in (slice(0, 3), slice(3, 10))]
    for name, value in whole.items():
        assert sum(part[name].item() for part in parts) == pytest.approx(value.item())
    advantage[~mask] = math.nan
    hidden = weight_sums(weights, advantage, mask)
    assert {name: value.item() for name, value in hidden.items()} == {n: v.item() for n, v in whole.items()}
    inside = mask & (advantage > 0)
    assert whole["positive"] == inside.sum()
    assert whole["raised"] == math.ceil(0.2 * inside.sum().item())
