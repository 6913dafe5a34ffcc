"""KL estimators, against the exact divergence of a small categorical distribution."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_stare.objective import kl_estimate


def policy_and_reference():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(9, generator=g, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(9, generator=g, dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    return logits, log_probs, reference


def exact(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (log_probs.exp() * (log_probs - reference)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: str) -> None:
    _, log_probs, reference = policy_and_reference()
    expectation = (log_probs.exp() * kl_estimate(kind, log_probs, reference)).sum()
    assert expectation.item() == pytest.approx(exact(log_probs, reference).item(), rel=1e-12)


def expected_gradient(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the estimator as a loss over samples of the policy; and of the exact divergence."""
    logits, log_probs, reference = policy_and_reference()
    loss = (log_probs.exp().detach() * kl_estimate(kind, log_probs, reference)).sum()
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (true,) = torch.autograd.grad(exact(log_probs, reference), logits)
    return found, true


def test_k2_has_the_gradient_of_the_divergence_and_k1_none() -> None:
    found, true = expected_gradient("k2")
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-14)
    found, _ = expected_gradient("k1")
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-15)


def test_k3_has_grpos_gradient() -> None:
    """arXiv 2402.03300, eq. 4 and the gradient coefficient of its appendix: 1 - pi_ref / pi by log-prob."""
    log_probs = torch.tensor([-0.5, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.7, -1.0, -1.0], dtype=torch.float64)
    estimate = kl_estimate("k3", log_probs, reference)
    r = [math.exp(q - p) for p, q in zip(log_probs.tolist(), reference.tolist(), strict=True)]
    assert estimate.tolist() == pytest.approx([x - math.log(x) - 1 for x in r], abs=1e-15)
    estimate.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([1 - x for x in r], abs=1e-15)


def test_k2_k3_and_abs_are_never_negative_and_0_where_equal() -> None:
    p, q = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1))
    for kind in ("k2", "k3", "abs"):
        assert (kl_estimate(kind, p, q) >= 0).all()
        assert torch.equal(kl_estimate(kind, p, p), torch.zeros(1000))
    torch.testing.assert_close(kl_estimate("abs", p, q), (p - q).abs())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_far_apart_stays_finite(kind: str) -> None:
    p = torch.tensor([-500.0, -0.1], requires_grad=True)
    estimate = kl_estimate(kind, p, torch.tensor([-0.1, -500.0]))
    estimate.sum().backward()
    assert estimate.isfinite().all() and torch.equal(p.grad, torch.zeros(2))


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k4' is none of k1"):
        kl_estimate("k4", torch.zeros(1), torch.zeros(1))
