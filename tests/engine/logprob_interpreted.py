"""The Triton kernels against plain torch and float64. Run by test_logprob_triton.py, in a process of its own:
Triton decides while it is imported whether its functions are interpreted, and another test may have
imported it.
"""

from __future__ import annotations

import pytest
import torch

from megatron_stare.engine import logprob, logprob_plain, logprob_triton
from megatron_stare.engine.logprob import log_prob_and_entropy


@pytest.fixture(autouse=True)
def several_programs_a_row(monkeypatch):
    monkeypatch.setattr(logprob_triton, "_COLUMNS", 64)


def block(dtype, rows: int = 9, columns: int = 200):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, columns, generator=generator) * 4).to(dtype)
    targets = torch.randint(-columns, 2 * columns, (rows,), generator=generator)
    targets[:2] = torch.tensor([0, columns - 1])
    return logits, targets, generator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1.7])
@pytest.mark.parametrize("columns", [1, 64, 200])
def test_statistics_equal_plain_torch(dtype, scale, columns):
    logits, targets, generator = block(dtype, columns=columns)
    plain = logprob._nothing_seen(logits)
    ours = plain.clone()
    for shift in (0.0, -30.0, 30.0):  # later blocks below and above what was seen
        shifted = logits + shift
        logprob_plain.accumulate(shifted.clone(), targets, scale, plain)
        logprob_triton.accumulate(shifted.clone(), targets, scale, ours)
        torch.testing.assert_close(ours, plain, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slope", [0.0, 1.0])
@pytest.mark.parametrize("columns", [1, 64, 200])
def test_gradient_equals_plain_torch(dtype, slope, columns):
    logits, targets, generator = block(dtype, columns=columns)
    rows_4N = torch.randn(4, logits.shape[0], generator=generator)
    rows_4N[0] = torch.logsumexp(logits.float() * 1.7, -1)
    rows_4N[2] *= slope
    plain = logprob_plain.gradient(logits.clone(), targets, 1.7, rows_4N)
    ours = logprob_triton.gradient(logits, targets, 1.7, rows_4N)
    assert ours.dtype == plain.dtype == dtype
    torch.testing.assert_close(ours, plain, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-6)


def test_no_rows_are_no_launch():
    empty, no_targets = torch.empty(0, 8), torch.empty(0, dtype=torch.int64)
    logprob_triton.accumulate(empty, no_targets, 1.0, torch.empty(4, 0))
    assert logprob_triton.gradient(empty, no_targets, 1.0, torch.empty(4, 0)).shape == (0, 8)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_whole_function_equals_float64_autograd(monkeypatch, temperature):
    monkeypatch.setattr(logprob, "_kernels_for", lambda _tensor: logprob_triton)
    monkeypatch.setattr(logprob, "_BLOCK_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 16, generator=generator).requires_grad_()
    weight = torch.randn(384, 16, generator=generator).requires_grad_()
    targets = torch.randint(0, 300, (11,), generator=generator)
    upstream = torch.randn(2, 11, generator=generator)
    out = log_prob_and_entropy(hidden, weight, targets, vocab_size=300, temperature=temperature)
    (out * upstream).sum().backward()

    exact = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    log_p = torch.log_softmax(exact[0] @ exact[1][:300].t() / temperature, -1)
    expected = torch.stack([log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])
    (expected * upstream.double()).sum().backward()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip((hidden, weight), exact, strict=True):
        error = (mine.grad.double() - theirs.grad).abs().max()
        assert error <= 1e-5 * theirs.grad.abs().max()
