"""What an evaluation reports about its samples."""

from itertools import combinations

import pytest

from megatron_stare.run.sampling import pass_at_k


@pytest.mark.parametrize(("samples", "right", "k"), [(6, 2, 3), (6, 0, 2), (6, 6, 1), (5, 4, 2), (4, 1, 4)])
def test_pass_at_k_counts_the_draws_that_hold_a_right_answer(samples, right, k):
    draws = list(combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))
