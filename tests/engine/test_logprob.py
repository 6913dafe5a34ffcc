"""log_prob_and_entropy against float64 log_softmax and autograd."""

from __future__ import annotations

import pytest
import torch

from megatron_stare.engine import logprob
from megatron_stare.engine.logprob import log_prob_and_entropy


def reference(hidden, weight, targets, vocab_size, temperature):
    """The straightforward way: whole logits, log_softmax, autograd."""
    log_p = torch.log_softmax(hidden @ weight[:vocab_size].t() / temperature, -1)
    return torch.stack([log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])


def random_case(rows: int = 37, hidden: int = 24, padded: int = 64, vocab_size: int = 50):
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(rows, hidden, generator=generator)
    weight_VH = torch.randn(padded, hidden, generator=generator)
    targets_N = torch.randint(0, vocab_size, (rows,), generator=generator)
    upstream = torch.randn(2, rows, generator=generator)
    return hidden_NH, weight_VH, targets_N, upstream, vocab_size


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
def test_values_and_gradients_equal_float64_autograd(monkeypatch, temperature, chunk_rows):
    hidden, weight, targets, upstream, vocab_size = random_case()
    monkeypatch.setattr(logprob, "_CHUNK_ELEMENTS", chunk_rows * weight.shape[0])
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]

    out = log_prob_and_entropy(*ours, targets, vocab_size=vocab_size, temperature=temperature)
    expected = reference(*exact, targets, vocab_size, temperature)
    (out * upstream).sum().backward()
    (expected * upstream.double()).sum().backward()

    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=2e-5)


def test_padded_vocabulary_has_no_probability_and_no_gradient():
    hidden, weight, targets, upstream, vocab_size = random_case()
    weight[vocab_size:] = 100.0  # would win every softmax
    weight.requires_grad_()
    out = log_prob_and_entropy(hidden, weight, targets, vocab_size=vocab_size)
    (out * upstream).sum().backward()
    assert torch.isfinite(out).all()
    assert (weight.grad[vocab_size:] == 0).all()


def test_no_rows_give_no_output_and_zero_gradients():
    hidden, weight, targets, _, vocab_size = random_case(rows=0)
    weight.requires_grad_()
    out = log_prob_and_entropy(hidden.requires_grad_(), weight, targets, vocab_size=vocab_size)
    out.sum().backward()
    assert out.shape == (2, 0)
    assert (weight.grad == 0).all()


def test_a_certain_token_has_no_entropy_and_finite_gradients():
    weight = torch.eye(4, 4) * 1000.0
    hidden = torch.eye(1, 4).requires_grad_()
    out = log_prob_and_entropy(hidden, weight, torch.tensor([0]), vocab_size=4)
    out.sum().backward()
    assert out.tolist() == [[0.0], [0.0]]
    assert torch.isfinite(hidden.grad).all()


def test_log_probs_never_exceed_zero():
    hidden, weight, targets, _, vocab_size = random_case(rows=500)
    out = log_prob_and_entropy(hidden * 20, weight, targets, vocab_size=vocab_size)
    assert (out[0] <= 1e-5).all()
    assert (out[1] >= -1e-4).all()
