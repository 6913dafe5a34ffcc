from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.objective import normalization, normalizer, token_multipliers

KINDS = ["token_mean", "sequence_mean", "dr_grpo"]
LONGEST = 9
lengths_lists = st.lists(st.integers(0, LONGEST), max_size=12)


def naive(kind: str, sequences: list[list[float]]) -> float:
    """The mean of the papers, over nested lists of token losses."""
    if kind == "token_mean":
        tokens = [x for sequence in sequences for x in sequence]
        return sum(tokens) / len(tokens)
    if kind == "sequence_mean":
        means = [sum(sequence) / len(sequence) for sequence in sequences if sequence]
        return sum(means) / len(means)
    return sum(sum(sequence) / LONGEST for sequence in sequences) / len(sequences)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(lengths=lengths_lists.filter(any), seed=st.integers(0, 2**31), cut=st.integers(0, 12))
def test_follows_the_definition_and_parts_add_up(kind: str, lengths: list[int], seed: int, cut: int) -> None:
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed))
    sequences = [part.tolist() for part in values.split(lengths)]
    norm = normalization(kind, lengths, LONGEST)
    assert norm.multipliers.dtype == torch.float32
    found = (norm.multipliers.double() * values).sum() / norm.normalizer
    assert found.item() == pytest.approx(naive(kind, sequences), rel=1e-6, abs=1e-6)

    parts = [normalization(kind, part, LONGEST) for part in (lengths[:cut], lengths[cut:])]
    assert sum(part.normalizer for part in parts) == norm.normalizer
    assert torch.equal(torch.cat([part.multipliers for part in parts]), norm.multipliers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_sequences_without_tokens_have_no_multiplier_and_no_nan(kind: str, lengths: list[int]) -> None:
    norm = normalization(kind, lengths, LONGEST)
    assert norm.multipliers.shape == (0,)
    assert norm.normalizer == (LONGEST * len(lengths) if kind == "dr_grpo" else 0)


def test_an_empty_response_between_others_changes_nothing_in_the_means() -> None:
    for kind in ("token_mean", "sequence_mean"):
        with_empty, without = normalization(kind, [2, 0, 4]), normalization(kind, torch.tensor([2, 4]))
        assert with_empty.normalizer == without.normalizer
        assert torch.equal(with_empty.multipliers, without.multipliers)
    assert token_multipliers("sequence_mean", torch.tensor([2, 0, 4])).tolist() == [0.5, 0.5] + [0.25] * 4


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="'mean' is none of token_mean"):
        normalization("mean", [1])
    with pytest.raises(ValueError, match="max_response_length >= 1, not None"):
        normalizer("dr_grpo", [1])
    with pytest.raises(ValueError, match="10 tokens, above max_response_length=9"):
        normalizer("dr_grpo", [10], 9)
    with pytest.raises(ValueError, match="-1 tokens"):
        normalizer("token_mean", [-1])
