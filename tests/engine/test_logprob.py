"""log_prob_and_entropy against float64 log_softmax and autograd."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.engine import logprob
from megatron_stare.engine.logprob import log_prob_and_entropy


def reference(hidden, weight, targets, vocab_size, temperature):
    """The straightforward way: whole logits, log_softmax, autograd."""
    log_p = torch.log_softmax(hidden @ weight[:vocab_size].t() / temperature, -1)
    return torch.stack([log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])


def random_case(rows: int = 37, hidden: int = 24, padded: int = 384, vocab_size: int = 300, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(rows, hidden, generator=generator)
    weight_VH = torch.randn(padded, hidden, generator=generator) * 0.5
    targets_N = torch.randint(0, vocab_size, (rows,), generator=generator)
    upstream = torch.randn(2, rows, generator=generator)
    return hidden_NH, weight_VH, targets_N, upstream, vocab_size


def gradients(function, hidden, weight, targets, upstream, *arguments, **keywords):
    """Values, and the gradients of hidden states and weight, in float64."""
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = function(*leaves, targets, *arguments, **keywords)
    (out * upstream.to(out)).sum().backward()
    return [t.double() for t in (out.detach(), leaves[0].grad, leaves[1].grad)]


def assert_close(ours, exact, tolerance: float):
    """Largest difference over the largest entry, for each of values and gradients."""
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.shape == theirs.shape
        assert ((mine - theirs).abs().max() <= tolerance * theirs.abs().max()) or theirs.numel() == 0


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    padding=st.integers(0, 200),
    vocab_size=st.integers(1, 400),
    temperature=st.sampled_from([1.0, 0.7, 1.3]),
    block=st.sampled_from([1, 5000, 1 << 24]),
    seed=st.integers(0, 3),
)
def test_values_and_gradients_equal_float64_autograd(rows, padding, vocab_size, temperature, block, seed):
    *case, _ = random_case(rows, padded=vocab_size + padding, vocab_size=vocab_size, seed=seed)
    hidden, weight, targets, upstream = case
    exact = gradients(reference, hidden.double(), weight.double(), targets, upstream, vocab_size, temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob, "_BLOCK_ELEMENTS", block)
        ours = gradients(log_prob_and_entropy, *case, vocab_size=vocab_size, temperature=temperature)
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_log_probs_or_entropy_alone(which):
    hidden, weight, targets, upstream, vocab_size = random_case()
    upstream[1 - which] = 0.0
    exact = gradients(reference, hidden.double(), weight.double(), targets, upstream, vocab_size, 1.0)
    ours = gradients(log_prob_and_entropy, hidden, weight, targets, upstream, vocab_size=vocab_size)
    assert_close(ours, exact, 1e-5)


def test_block_size_does_not_change_the_result(monkeypatch):
    *case, vocab_size = random_case()
    results = []
    for elements in (1, 37 * 256, 1 << 24):  # blocks of 128 and 256 columns, the last one cut; one block
        monkeypatch.setattr(logprob, "_BLOCK_ELEMENTS", elements)
        results.append(gradients(log_prob_and_entropy, *case, vocab_size=vocab_size))
    assert_close(results[0], results[2], 2e-6)
    assert_close(results[1], results[2], 2e-6)


def test_blocks_cover_each_column_once_within_the_budget(monkeypatch):
    monkeypatch.setattr(logprob, "_BLOCK_ELEMENTS", 100_000)
    for rows, columns in ((0, 1000), (1, 1000), (37, 5000), (37, 2688), (100_000, 300), (5, 0)):
        blocks = list(logprob._blocks(rows, columns))
        assert [i for block in blocks for i in range(columns)[block]] == list(range(columns))
        assert all((b.stop - b.start) * rows <= max(100_000, rows * 128) for b in blocks)


def test_bfloat16_is_as_near_to_float64_as_its_logits_allow():
    hidden, weight, targets, upstream, vocab_size = random_case()
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    exact = gradients(reference, hidden.double(), weight.double(), targets, upstream, vocab_size, 1.0)
    ours = gradients(log_prob_and_entropy, hidden, weight, targets, upstream, vocab_size=vocab_size)
    assert_close(ours, exact, 1e-2)


def test_only_wanted_gradients_are_computed():
    hidden, weight, targets, upstream, vocab_size = random_case()
    both = gradients(log_prob_and_entropy, hidden, weight, targets, upstream, vocab_size=vocab_size)
    for i, leaf in enumerate((hidden, weight)):
        leaf.requires_grad_()
        out = log_prob_and_entropy(hidden, weight, targets, vocab_size=vocab_size)
        (out * upstream).sum().backward()
        assert torch.equal(leaf.grad.double(), both[i + 1])
        leaf.requires_grad_(False)
    assert hidden.grad is not None and weight.grad is not None


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_certain_token_has_no_entropy_and_finite_gradients(temperature):
    weight = torch.eye(4, 4) * 1000.0
    hidden = torch.eye(1, 4).requires_grad_()
    out = log_prob_and_entropy(hidden, weight, torch.tensor([0]), vocab_size=4, temperature=temperature)
    out.sum().backward()
    assert out.tolist() == [[0.0], [0.0]]
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_never_exceed_zero(temperature):
    hidden, weight, _, _, vocab_size = random_case(rows=500)
    likeliest = (hidden @ weight[:vocab_size].t()).argmax(-1)
    out = log_prob_and_entropy(hidden * 20, weight, likeliest, vocab_size=vocab_size, temperature=temperature)
    assert (out[0] <= 0).all()
    assert (out[1] >= 0).all()


# With TP 3 the shards of 128 hold 128, 72 and no real tokens.
@pytest.mark.parametrize(("ranks", "vocab_size"), [(2, 300), (3, 200)])
def test_shards_together_equal_one_process(tmp_path, ranks, vocab_size):
    hidden, weight, targets, upstream, _ = random_case(vocab_size=vocab_size)
    exact = gradients(reference, hidden.double(), weight.double(), targets, upstream, vocab_size, 0.7)
    arguments = (ranks, tmp_path, (hidden, weight, targets, upstream), vocab_size)
    torch.multiprocessing.start_processes(_one_shard, arguments, nprocs=ranks, start_method="fork")
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for out, _, _ in parts:
        torch.testing.assert_close(out, exact[0], rtol=1e-5, atol=1e-5)
    together = [parts[0][0], sum(part[1] for part in parts), torch.cat([part[2] for part in parts])]
    assert_close(together, exact, 1e-5)


def _one_shard(rank: int, ranks: int, scratch: Path, case, vocab_size: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    logprob._BLOCK_ELEMENTS = 1  # several blocks a shard
    store = f"file://{scratch}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=1)
    )
    hidden, weight, targets, upstream = case
    shard = weight.chunk(ranks)[rank].clone()
    group = dist.group.WORLD
    result = gradients(
        log_prob_and_entropy,
        hidden,
        shard,
        targets,
        upstream,
        vocab_size=vocab_size,
        temperature=0.7,
        group=group,
    )
    torch.save(result, scratch / f"{rank}.pt")
    dist.destroy_process_group()
