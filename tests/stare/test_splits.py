"""Properties over 1 to 4 real gloo ranks: no split of a batch, and no order, changes a weight by one bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_stare.stare import ReweightRule, surprisal_thresholds, token_weights
from tests.support.rank_pool import RankPool

# Few values, so that ties are likely, beside any that a float32 can hold.
surprisals = st.one_of(
    st.sampled_from([0.0, -0.0, -1e-5, 1e-45, 0.25, 0.5, 0.50000006, 2.0, math.inf]),
    st.floats(0, math.inf, width=32, allow_subnormal=True),
)
tokens = st.tuples(
    surprisals,
    st.sampled_from([-2.0, -1.0, 0.0, 1.0, 0.3]),
    st.booleans(),
    st.integers(0, 3),  # its rank, modulo their number
)
fractions = st.sampled_from([0.0, 0.001, 0.1, 0.25, 1 / 3, 0.7, 1.0])
weights_ = st.sampled_from([0.5, 0.9, 1.0, 1.1, 1.7])
rules = st.one_of(
    st.builds(ReweightRule.o1, weights_, fractions),
    st.builds(ReweightRule.c2, weights_, weights_, fractions),
    st.builds(ReweightRule.four_quadrant, M_low=weights_, M=weights_, top_fraction=fractions),
    st.builds(
        ReweightRule.custom,
        high_positive=weights_,
        low_positive=weights_,
        high_negative=weights_,
        low_negative=weights_,
        top_fraction=fractions,
        pool=st.sampled_from(["per_sign", "all"]),
    ),
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(4, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


def as_tensors(columns: list[list[float]]) -> list[torch.Tensor]:
    surprisal, advantage, mask = columns
    return [torch.tensor(surprisal), torch.tensor(advantage), torch.tensor(mask, dtype=torch.bool)]


def weights_of_one_rank(
    group: dist.ProcessGroup, columns: list[list[float]], rule: dict, microbatches: int
) -> list[int]:
    """Runs on each rank: the weights' bits, computed whole and by microbatches, which must agree."""
    batch, rule = as_tensors(columns), ReweightRule(**rule)
    weights = token_weights(*batch, rule, group)
    thresholds = surprisal_thresholds(*batch, rule, group)
    for i in range(microbatches):
        part = [tensor[i::microbatches] for tensor in batch]
        assert torch.equal(token_weights(*part, rule, thresholds=thresholds), weights[i::microbatches])
    return weights.view(torch.int32).tolist()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.lists(tokens, max_size=40),
    rule=rules,
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    shuffle=st.randoms(use_true_random=False),
)
def test_any_split_in_any_order_gives_the_same_weights_to_the_bit(
    pool: RankPool, batch, rule: ReweightRule, ranks: int, microbatches: int, shuffle
) -> None:
    whole = as_tensors([[token[i] for token in batch] for i in range(3)])
    expected = token_weights(*whole, rule).view(torch.int32).tolist()
    order = list(range(len(batch)))
    shuffle.shuffle(order)
    owned = [[i for i in order if batch[i][3] % ranks == rank] for rank in range(ranks)]
    arguments = [
        {
            "columns": [[batch[i][column] for i in mine] for column in range(3)],
            "rule": vars(rule),
            "microbatches": microbatches,
        }
        for mine in owned
    ]
    answers = pool.call("tests.stare.test_splits:weights_of_one_rank", arguments)
    assert answers == [[expected[i] for i in mine] for mine in owned]


@settings(max_examples=200, deadline=None)
@given(batch=st.lists(tokens, max_size=60), rule=rules)
def test_the_total_weight_is_that_of_k_high_tokens_whatever_ties(batch, rule: ReweightRule) -> None:
    surprisal, advantage, mask = as_tensors([[token[i] for token in batch] for i in range(3)])
    if rule.pool == "all":
        advantage = advantage.abs() + 1.0  # one sign, so that the pool's k is the sign's
    weights = token_weights(surprisal, advantage, mask, rule).double()
    for sign, high, low in (
        (1, rule.high_positive, rule.low_positive),
        (-1, rule.high_negative, rule.low_negative),
    ):
        inside = mask & (advantage * sign > 0)
        n = int(inside.sum())
        k = min(n, max(1, math.ceil(round(rule.top_fraction * n, 9)))) if rule.top_fraction else 0
        assert weights[inside].sum().item() == pytest.approx(k * high + (n - k) * low, rel=1e-6)
