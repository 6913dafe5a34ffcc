from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.objective import policy_loss, sft_loss
from megatron_stare.stare import EntropyGate, GateConfig, ReweightRule, token_weights

CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


Batch = dict[str, torch.Tensor]


def random_batch(seed: int, shape=(6, 9), dtype=torch.float64, spread: float = 0.5) -> Batch:
    g = torch.Generator().manual_seed(seed)
    new = torch.rand(shape, generator=g, dtype=dtype).log()
    return {
        "log_probs": new.requires_grad_(),
        "old_log_probs": new.detach() + spread * torch.randn(shape, generator=g, dtype=dtype),
        "advantages": torch.randint(-2, 3, shape, generator=g).to(dtype),
        "mask": torch.rand(shape, generator=g) < 0.7,
        "weights": 0.5 + torch.rand(shape, generator=g, dtype=dtype),
    }


def naive(batch: Batch, clip_low: float, clip_high: float, dual_clip: float | None):
    """Token by token in Python floats: loss, its derivative by each log-prob, and the metrics."""
    loss, gradient = 0.0, []
    sums = dict.fromkeys(("ratio", "clip_low", "clip_high", "dual_clip", "approx_kl"), 0.0)
    flat = {name: tensor.detach().flatten().tolist() for name, tensor in batch.items()}
    for new, old, a, m, w in zip(*flat.values(), strict=True):
        if not m:
            gradient.append(0.0)
            continue
        rho = math.exp(new - old)
        clipped = min(max(rho, 1 - clip_low), 1 + clip_high)
        objective, slope = min((rho * a, rho * a), (clipped * a, rho * a if clipped == rho else 0.0))
        if a < 0 and dual_clip is not None and objective < dual_clip * a:
            objective, slope = dual_clip * a, 0.0
        loss -= w * objective
        gradient.append(-w * slope)
        sums["ratio"] += rho
        sums["clip_low"] += a < 0 and rho < 1 - clip_low
        sums["clip_high"] += a > 0 and rho > 1 + clip_high
        sums["dual_clip"] += a < 0 and dual_clip is not None and rho > dual_clip
        sums["approx_kl"] += rho - 1 - math.log(rho)
    return loss, gradient, sums


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    clip_low=st.sampled_from([0.0, 0.2, 0.5]),
    clip_high=st.sampled_from([0.0, 0.2, 0.28]),
    dual_clip=st.sampled_from([None, 1.5, 10.0]),
    spread=st.sampled_from([0.1, 1.0, 3.0]),
)
def test_loss_gradient_and_metrics_follow_the_definition(seed, clip_low, clip_high, dual_clip, spread):
    batch = random_batch(seed, spread=spread)
    result = policy_loss(**batch, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    loss, gradient, sums = naive(batch, clip_low, clip_high, dual_clip)
    assert result.loss_sum.item() == pytest.approx(loss, rel=1e-12, abs=1e-12)
    result.loss_sum.backward()
    expected = torch.tensor(gradient, dtype=torch.float64).view_as(batch["log_probs"])
    torch.testing.assert_close(batch["log_probs"].grad, expected, rtol=1e-12, atol=1e-12)
    assert {name: value.item() for name, value in result.metrics.items()} == pytest.approx(sums, rel=1e-9)
    assert not any(value.requires_grad for value in result.metrics.values())


def test_float32_agrees_with_float64() -> None:
    batch = random_batch(1, (32, 64), torch.float32)
    result = policy_loss(**batch, **CLIPS)
    result.loss_sum.backward()
    loss, gradient, _ = naive(batch, **CLIPS)
    assert result.loss_sum.item() == pytest.approx(loss, rel=1e-5)
    expected = torch.tensor(gradient).view(32, 64)
    torch.testing.assert_close(batch["log_probs"].grad, expected, rtol=2e-6, atol=1e-6)


def test_on_policy_the_gradient_is_the_whole_weighted_advantage() -> None:
    batch = random_batch(2)
    batch["old_log_probs"] = batch["log_probs"].detach().clone()
    policy_loss(**batch, clip_low=0.2, clip_high=0.2, dual_clip=None).loss_sum.backward()
    expected = -batch["weights"] * batch["advantages"] * batch["mask"]
    assert torch.equal(batch["log_probs"].grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_weights_are_bit_identical_to_ones(dtype: torch.dtype) -> None:
    results = []
    for weights in (None, torch.ones(40, 50, dtype=torch.float32)):
        batch = random_batch(3, (40, 50), dtype)
        result = policy_loss(**{**batch, "weights": weights}, **CLIPS)
        result.loss_sum.backward()
        results.append([result.loss_sum, batch["log_probs"].grad, *result.metrics.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_closed_gate_is_bit_identical_to_no_stare() -> None:
    """What the trainer does with a decision, against plain GRPO; and a rule of ones against both."""
    decision = EntropyGate(GateConfig(target_entropy=0.3)).update(0.5)
    assert decision.rule is None
    ones = ReweightRule.custom()
    gradients, losses = [], []
    for rule in (None, decision.rule, ones):
        batch = random_batch(4, (40, 50), torch.float32)
        surprisal = -batch["old_log_probs"].clamp(max=0)
        arguments = (surprisal, batch["advantages"], batch["mask"])
        batch["weights"] = token_weights(*arguments, rule) if rule is not None else None
        loss = policy_loss(**batch, **CLIPS).loss_sum
        loss.backward()
        losses.append(loss)
        gradients.append(batch["log_probs"].grad)
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize("shape", [(4, 5), (0, 5), (0,)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_empty_mask_gives_exact_zero_and_no_nan(shape: tuple[int, ...], bad: float) -> None:
    log_probs = torch.full(shape, bad, requires_grad=True)
    junk = torch.full(shape, bad)
    mask = torch.zeros(shape, dtype=torch.bool)
    for result in (policy_loss(log_probs, junk, junk, mask, junk, **CLIPS), sft_loss(log_probs, mask)):
        assert result.loss_sum.item() == 0.0
        assert math.copysign(1, result.loss_sum.item()) == 1
        assert all(value.item() == 0.0 for value in result.metrics.values())
        (gradient,) = torch.autograd.grad(result.loss_sum, log_probs)
        assert torch.equal(gradient, torch.zeros(shape))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_the_mask_hides_reaches_neither_loss_nor_gradient(bad: float) -> None:
    clean, dirty = random_batch(5), random_batch(5)
    for name in ("old_log_probs", "advantages", "weights"):
        dirty[name] = torch.where(dirty["mask"], dirty[name], bad)
    dirty["log_probs"] = torch.where(dirty["mask"], dirty["log_probs"].detach(), bad).requires_grad_()
    results = [policy_loss(**batch, **CLIPS) for batch in (clean, dirty)]
    for result in results:
        result.loss_sum.backward()
    assert torch.equal(results[0].loss_sum, results[1].loss_sum)
    assert torch.equal(clean["log_probs"].grad, dirty["log_probs"].grad)
    assert results[0].metrics == results[1].metrics


def test_a_nan_inside_the_mask_is_not_hidden() -> None:
    batch = random_batch(6)
    batch["mask"] = torch.ones_like(batch["mask"])
    batch["old_log_probs"][0, 0] = math.nan
    assert policy_loss(**batch, **CLIPS).loss_sum.isnan()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_a_runaway_ratio_stays_finite(advantage: float, gap: float) -> None:
    log_probs = torch.tensor([-0.5], requires_grad=True)
    one = torch.ones(1)
    result = policy_loss(
        log_probs, log_probs.detach() - gap, advantage * one, one, None, clip_low=0.2, clip_high=0.2
    )
    result.loss_sum.backward()
    assert result.loss_sum.isfinite() and log_probs.grad.isfinite().all()
    assert all(value.isfinite() for value in result.metrics.values())


def test_dual_clip_bounds_the_loss_of_bad_responses_only() -> None:
    log_probs = torch.tensor([0.0, 0.0], requires_grad=True)
    old = torch.tensor([-5.0, -5.0])
    advantages = torch.tensor([-1.0, 1.0])
    arguments = (log_probs, old, advantages, torch.ones(2), None)
    result = policy_loss(*arguments, clip_low=0.2, clip_high=0.2, dual_clip=10.0)
    assert result.loss_sum.item() == pytest.approx(10.0 - 1.2)
    assert {name: result.metrics[name].item() for name in ("clip_low", "clip_high", "dual_clip")} == {
        "clip_low": 0,
        "clip_high": 1,
        "dual_clip": 1,
    }
    unbounded = policy_loss(*arguments, clip_low=0.2, clip_high=0.2, dual_clip=None)
    assert unbounded.loss_sum.item() == pytest.approx(math.exp(5) - 1.2, rel=1e-6)


def test_sums_over_microbatches_are_the_sum_of_the_batch() -> None:
    batch = random_batch(7, (10, 8))
    whole = policy_loss(**batch, **CLIPS)
    parts = [
        policy_loss(**{name: tensor[rows] for name, tensor in batch.items()}, **CLIPS)
        for rows in (slice(0, 1), slice(1, 1), slice(1, 10))
    ]
    assert sum(part.loss_sum.item() for part in parts) == pytest.approx(whole.loss_sum.item(), rel=1e-12)
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-12)


def test_halves_are_widened() -> None:
    batch = random_batch(8, dtype=torch.float32)
    batch["log_probs"] = batch["log_probs"].detach().bfloat16().requires_grad_()
    result = policy_loss(**batch, **CLIPS)
    assert result.loss_sum.dtype == torch.float32
    result.loss_sum.backward()
    assert batch["log_probs"].grad.dtype == torch.bfloat16


def test_sft_is_the_negative_log_likelihood() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    result = sft_loss(log_probs, torch.tensor([1, 0, 1]))
    result.loss_sum.backward()
    assert result.loss_sum.item() == 5.0
    assert log_probs.grad.tolist() == [-1.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": 1.0}, "clip_low=1.0"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
        ({"weights": torch.ones(3)}, "weights has shape"),
        ({"mask": torch.ones(3)}, "mask has shape"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(**{**random_batch(9), **CLIPS, **change})
