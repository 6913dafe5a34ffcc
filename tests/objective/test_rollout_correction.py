from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.objective import rollout_correction


def naive(kind, level, old, sampler, sequence, cap, floor):
    """Token by token in Python floats: weight, raw ratio, changed."""
    out = []
    for i in range(len(old)):
        members = [i] if level == "token" else [j for j in range(len(old)) if sequence[j] == sequence[i]]
        ratio = math.prod(math.exp(old[j]) / math.exp(sampler[j]) for j in members)
        if kind == "truncate":
            out.append((min(ratio, cap), ratio, ratio > cap))
        else:
            keep = floor <= ratio <= cap
            out.append((ratio if keep else 0.0, ratio, not keep))
    return [list(column) for column in zip(*out, strict=True)]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["truncate", "mask"]),
    level=st.sampled_from(["token", "sequence"]),
    cap=st.sampled_from([1.0, 2.0, 5.0]),
    floor=st.sampled_from([0.0, 0.5]),
)
def test_follows_the_definition(seed, kind, level, cap, floor) -> None:
    g = torch.Generator().manual_seed(seed)
    old = torch.rand(20, generator=g, dtype=torch.float64).log()
    sampler = old + 0.6 * torch.randn(20, generator=g, dtype=torch.float64)
    sequence = torch.randint(0, 5, (20,), generator=g)
    found = rollout_correction(kind, old, sampler, level=level, cap=cap, floor=floor, sequence=sequence)
    weight, ratio, changed = naive(kind, level, old.tolist(), sampler.tolist(), sequence.tolist(), cap, floor)
    assert found.weight.tolist() == pytest.approx(weight, rel=1e-9)
    assert found.ratio.tolist() == pytest.approx(ratio, rel=1e-9)
    assert found.changed.tolist() == changed


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_log_probs_give_exactly_one_and_no_gradient(kind: str, level: str) -> None:
    old = torch.rand(7, requires_grad=True).log()
    sequence = torch.tensor([0, 0, 1, 1, 1, 3, 3])
    found = rollout_correction(kind, old, old.detach(), level=level, sequence=sequence)
    assert torch.equal(found.weight, torch.ones(7)) and not found.changed.any()
    assert not found.weight.requires_grad


def test_far_apart_stays_finite_and_nan_stays_nan() -> None:
    old, sampler = torch.tensor([0.0, -500.0, math.nan]), torch.tensor([-500.0, 0.0, 0.0])
    for kind in ("truncate", "mask"):
        weight = rollout_correction(kind, old, sampler).weight
        assert weight[:2].isfinite().all() and weight[2].isnan()


def test_wrong_arguments_are_refused() -> None:
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match="which sequence"):
        rollout_correction("mask", zeros, zeros, level="sequence")
    with pytest.raises(ValueError, match="'none' is none of truncate, mask"):
        rollout_correction("none", zeros, zeros)
