"""Rival entropy controls, against sorting the whole batch; and over real gloo ranks."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_stare.objective import (
    ENTROPY_CONTROLS,
    ClipCov,
    EntropyAdvantage,
    KlCov,
    ObjectiveSpec,
    TokenTerms,
    TopEntropy,
    global_token_ids,
    objective_loss,
    prepare,
    token_covariance,
)
from megatron_stare.objective.selection import exact_means, random_priority
from tests.objective.control_ranks import CONTROLS, make_batch
from tests.support.ranks import run_ranks


def batch(seed: int, n: int = 200, masked: float = 0.8) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "log_probs": torch.rand(n, generator=g).log(),
        "entropy": torch.rand(n, generator=g),
        "advantages": torch.randn(n, generator=g),
        "mask": torch.rand(n, generator=g) < masked,
        "token_ids": torch.arange(n),
    }


def covariances(b: dict[str, torch.Tensor]) -> dict[int, float]:
    """arXiv 2505.22617, section 4: of each masked token, in Python floats."""
    tokens = b["mask"].nonzero().flatten().tolist()
    logs, a = b["log_probs"].tolist(), b["advantages"].tolist()
    mean_log, mean_a = (statistics.fmean(x[t] for t in tokens) if tokens else 0 for x in (logs, a))
    return {t: (logs[t] - mean_log) * (a[t] - mean_a) for t in tokens}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), alpha=st.sampled_from([0.0, 0.1, 0.4]), kappa=st.sampled_from([1.5, 2.0]))
def test_entropy_advantage_follows_the_definition(seed: int, alpha: float, kappa: float) -> None:
    b = batch(seed)
    found = prepare(EntropyAdvantage(alpha, kappa), **b)
    assert found.weight is None and found.kl_coef is None
    for t, value in enumerate(found.advantage.tolist()):
        a, h, m = (b[name][t].item() for name in ("advantages", "entropy", "mask"))
        assert value == pytest.approx(min(alpha * h, abs(a) / kappa) if m else 0.0, rel=1e-6)
        assert (a + value) * a > 0 or not m


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(0, 90), fraction=st.sampled_from([0.07, 0.2, 0.5, 1.0]))
def test_top_entropy_keeps_the_most_uncertain_tokens(seed: int, n: int, fraction: float) -> None:
    b = batch(seed, n)
    found = prepare(TopEntropy(fraction), **b).weight
    tokens = sorted(b["mask"].nonzero().flatten().tolist(), key=lambda t: -b["entropy"][t].item())
    k = -(-round(fraction * 100) * len(tokens) // 100)
    assert {t for t in tokens if found[t] == 1} == set(tokens[:k])
    assert {t for t in tokens if found[t] == 0} == set(tokens[k:])
    assert torch.equal(found[~b["mask"]], torch.ones(n)[~b["mask"]])


def test_tokens_that_tie_share_the_places_left() -> None:
    entropy = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.1])
    zeros = torch.zeros(5)
    weight = prepare(TopEntropy(0.4), log_probs=zeros, entropy=entropy, advantages=zeros).weight
    assert weight.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3, 0])


def test_two_tokens_of_equal_covariance_share_the_penalty() -> None:
    b = {**batch(0, 2), "log_probs": torch.tensor([-1.0, -3.0]), "advantages": torch.tensor([1.0, -1.0])}
    b["mask"] = torch.ones(2)
    assert prepare(KlCov(0.5), **b).kl_coef.tolist() == [0.5, 0.5]


def test_without_the_low_entropy_tokens_n_stays_that_of_all_tokens() -> None:
    """arXiv 2506.01939: an indicator inside the sum, 1 / (all tokens) before it."""
    b = {**batch(0), "mask": torch.ones(200, dtype=torch.bool)}
    terms = prepare(TopEntropy(0.2), **b)
    log_probs = b["log_probs"].clone().requires_grad_()
    loss = objective_loss(
        ObjectiveSpec(), log_probs, None, b["log_probs"], b["advantages"], b["mask"], terms=terms
    ).loss_sum
    loss.backward()
    chosen = b["entropy"] >= b["entropy"].topk(40).values[-1]
    torch.testing.assert_close(log_probs.grad, -b["advantages"] * chosen)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(0, 90), fraction=st.sampled_from([0.002, 0.07, 0.5, 1.0]))
def test_kl_cov_penalises_the_tokens_of_highest_covariance(seed: int, n: int, fraction: float) -> None:
    b = batch(seed, n)
    expected = covariances(b)
    assume(len(expected) != 2)  # two tokens always tie: see below
    found = prepare(KlCov(fraction, coef=0.7), **b).kl_coef
    k = max(1, math.floor(round(fraction * 1000) * len(expected) / 1000))
    ranked = sorted((t for t in expected if expected[t] > 0), key=lambda t: -expected[t])
    assert set(found.nonzero().flatten().tolist()) == set(ranked[:k])
    assert all(value == pytest.approx(0.7) for value in found[found > 0].tolist())


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(0, 90), fraction=st.sampled_from([0.002, 0.07, 0.5]))
def test_clip_cov_silences_some_tokens_of_the_band(seed: int, n: int, fraction: float) -> None:
    b = batch(seed, n)
    found = prepare(ClipCov(fraction, low=0.1, high=1.0), **b).weight
    expected = covariances(b)
    band = {t for t in expected if 0.1 <= expected[t] <= 1.0}
    silent = set((found == 0).nonzero().flatten().tolist())
    k = max(1, math.floor(round(fraction * 1000) * len(expected) / 1000))
    assert silent <= band and len(silent) == min(k, len(band))
    assert (found[[t for t in range(n) if t not in silent]] == 1).all()


def test_clip_covs_choice_is_uniform_and_new_in_every_step_and_for_every_seed() -> None:
    b = {**batch(1, 400), "mask": torch.ones(400, dtype=torch.bool)}
    control = ClipCov(0.05, low=0.0, high=5.0)
    band = (token_covariance(b["log_probs"], b["advantages"], b["mask"])[0] >= 0).nonzero().flatten()
    counts = torch.zeros(400)
    choices = set()
    for step in range(2000):
        silent = prepare(control, **b, step=step).weight == 0
        counts += silent
        choices.add(tuple(silent.nonzero().flatten().tolist()))
    assert len(choices) == 2000
    expected = 2000 * 20 / len(band)
    # Chi-squared with len(band) - 1 degrees of freedom, less for drawing without replacement: 5 sigma.
    chi2 = ((counts[band] - expected).square() / expected).sum().item() / (1 - 20 / len(band))
    assert abs(chi2 - len(band)) < 5 * math.sqrt(2 * len(band))
    again, other = (prepare(control, **b, step=5, seed=seed).weight for seed in (0, 1))
    assert torch.equal(again, prepare(control, **b, step=5).weight) and not torch.equal(again, other)


def test_random_priorities_are_splitmix64s_and_positive() -> None:
    """The finaliser in Python integers."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    ids = [0, 1, 2, 12345, 2**40 + 7, 2**62]
    expected = [mix(mix(mix(17) ^ 99) ^ i) % 2**30 + 0x00800000 for i in ids]
    found = random_priority(torch.tensor(ids), seed=17, step=99)
    assert found.view(torch.int32).tolist() == expected
    many = random_priority(torch.arange(100_000), 0, 0)
    assert (many > 0).all() and many.isfinite().all() and many.unique().numel() > 99_980


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), max_size=40),
    seed=st.integers(0, 100),
)
def test_means_are_right_and_do_not_depend_on_the_order(values: list[float], seed: int) -> None:
    x = torch.tensor(values)
    everything = torch.ones_like(x, dtype=torch.bool)
    (mean,), n = exact_means({"x": x}, everything, None)
    assert n == len(values)
    exact = math.fsum(x.tolist()) / max(n, 1)
    assert mean.item() == pytest.approx(exact, rel=1e-12, abs=1e-9)
    shuffled = x[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))]
    assert torch.equal(exact_means({"x": shuffled}, everything, None)[0][0], mean)


def test_ids_of_tokens_do_not_depend_on_the_layout() -> None:
    whole = global_token_ids([0, 1, 2, 3], [2, 0, 3, 1])
    assert whole.unique().numel() == 6
    parts = torch.cat(
        [global_token_ids([3, 0], [1, 2]), global_token_ids([], []), global_token_ids([1, 2], [0, 3])]
    )
    assert sorted(parts.tolist()) == sorted(whole.tolist())


def test_terms_are_cut_by_microbatch() -> None:
    terms = prepare(KlCov(0.1), **batch(2))
    parts = terms.split([50, 0, 150])
    assert [part.kl_coef.shape[0] for part in parts] == [50, 0, 150]
    assert torch.equal(torch.cat([part.kl_coef for part in parts]), terms.kl_coef)
    assert all(part.weight is None for part in parts)
    assert TokenTerms().split([1, 2]) == [TokenTerms(), TokenTerms()]


@pytest.mark.parametrize("control", CONTROLS, ids=str)
def test_any_order_gives_the_same_terms_and_junk_outside_the_mask_reaches_nothing(control) -> None:
    for seed in range(10):
        b = make_batch(seed)
        clean = {**b, **{k: v.nan_to_num(0.0) for k, v in b.items() if v.is_floating_point()}}
        order = torch.randperm(len(b["mask"]), generator=torch.Generator().manual_seed(seed))
        expected = prepare(control, **clean, seed=3)
        shuffled = prepare(control, **{k: v[order] for k, v in b.items()}, seed=3)
        for (_, a), (_, c) in zip(shuffled.items(), expected.items(), strict=True):
            assert torch.equal(a, c[order]) and a.dtype == torch.float32


def test_any_split_over_ranks_gives_the_terms_of_one_process_to_the_bit() -> None:
    cases = 30
    found = run_ranks("tests.objective.control_ranks:compare", 3, {"cases": cases}, timeout=120)
    assert found == [cases * (len(CONTROLS) + 1) + 3] * 3


def test_no_control_asks_nothing() -> None:
    assert prepare(None, **batch(3)) is None


def test_a_config_can_name_every_control() -> None:
    assert {type(control) for control in CONTROLS} == set(ENTROPY_CONTROLS.values())
    assert ENTROPY_CONTROLS["kl_cov"](fraction=0.1) == KlCov(0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EntropyAdvantage(alpha=-1), "alpha=-1"),
        (lambda: EntropyAdvantage(kappa=1.0), "kappa=1.0 is not above 1"),
        (lambda: TopEntropy(0.0), "fraction=0.0"),
        (lambda: ClipCov(1.5), "fraction=1.5"),
        (lambda: ClipCov(low=2.0, high=1.0), "low=2.0 is above high=1.0"),
        (lambda: KlCov(coef=math.nan), "coef=nan"),
        (lambda: prepare(ClipCov(), **{**batch(4), "token_ids": None}), "there are none"),
        (lambda: prepare(KlCov(), **{**batch(4), "advantages": torch.ones(3)}), "advantages has shape"),
        (
            lambda: prepare(KlCov(), **{**batch(4), "log_probs": torch.full((200,), -math.inf)}),
            "log-prob is not finite at",
        ),
        (
            lambda: prepare(TopEntropy(), **{**batch(4), "entropy": torch.full((200,), -1.0)}),
            "entropy is below 0",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
