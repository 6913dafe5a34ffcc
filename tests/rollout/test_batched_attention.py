"""Batched attention against one plain causal attention a sequence."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_stare.rollout import batched_attention

HEADS, KEY_HEADS, SIZE = 4, 2, 8


@pytest.fixture
def batch():
    torch.manual_seed(0)
    seq_lens = torch.tensor([5, 1, 17, 9, 9, 2])
    prefix_lens = torch.tensor([2, 0, 16, 0, 8, 1])
    cache = [torch.randn(100, KEY_HEADS, SIZE) for _ in range(2)]
    # Slots are scattered; those past a sequence's end belong to nobody and would give NaN if read.
    slots = torch.full((6, 32), 99)
    free = torch.randperm(99).tolist()
    for row, length in enumerate(seq_lens.tolist()):
        slots[row, :length] = torch.tensor([free.pop() for _ in range(length)])
    for tensor in cache:
        tensor[99] = float("nan")
    return seq_lens, prefix_lens, cache, slots


def one_by_one(query, cache, slots, seq_lens, prefix_lens):
    outputs = []
    for row, (length, prefix) in enumerate(zip(seq_lens.tolist(), prefix_lens.tolist(), strict=True)):
        key, value = (tensor[slots[row, :length]].transpose(0, 1) for tensor in cache)
        mask = torch.ones(length, length).tril().bool()[prefix:]
        start = len(torch.cat(outputs)) if outputs else 0
        part = query[start : start + length - prefix].transpose(0, 1)
        result = scaled_dot_product_attention(part, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
        outputs.append(result.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "limits", [(1 << 16, 1 << 22), (20, 1 << 22), (1 << 16, 30)], ids=["one-group", "keys", "mask"]
)
def test_extend_is_attention_one_by_one(batch, monkeypatch, limits):
    monkeypatch.setattr(batched_attention, "MAX_PADDED_KEYS", limits[0])
    monkeypatch.setattr(batched_attention, "MAX_MASK", limits[1])
    seq_lens, prefix_lens, cache, slots = batch
    query = torch.randn(int((seq_lens - prefix_lens).sum()), HEADS, SIZE)
    output = torch.full_like(query, float("nan"))
    batched_attention.extend(
        query, output, *cache, slots, seq_lens, prefix_lens, scaling=0.3, enable_gqa=True
    )
    torch.testing.assert_close(output, one_by_one(query, cache, slots, seq_lens, prefix_lens))


@pytest.mark.parametrize("padded_keys", [1 << 16, 20, 1])
def test_decode_is_attention_one_by_one(batch, monkeypatch, padded_keys):
    monkeypatch.setattr(batched_attention, "MAX_PADDED_KEYS", padded_keys)
    seq_lens, _, cache, slots = batch
    query = torch.randn(len(seq_lens), HEADS, SIZE)
    output = torch.full_like(query, float("nan"))
    batched_attention.decode(query, output, *cache, slots, seq_lens, scaling=0.3, enable_gqa=True)
    torch.testing.assert_close(output, one_by_one(query, cache, slots, seq_lens, seq_lens - 1))


def test_exact_results_are_those_of_each_sequence_alone(batch):
    seq_lens, prefix_lens, cache, slots = batch
    q_lens = (seq_lens - prefix_lens).tolist()
    query = torch.randn(sum(q_lens), HEADS, SIZE)
    together = torch.empty_like(query)
    batched_attention.extend(
        query, together, *cache, slots, seq_lens, prefix_lens, exact=True, enable_gqa=True
    )
    for row, part in enumerate(query.split(q_lens)):
        alone = torch.empty_like(part)
        one = slice(row, row + 1)
        batched_attention.extend(
            part, alone, *cache, slots[one], seq_lens[one], prefix_lens[one], exact=True, enable_gqa=True
        )
        assert torch.equal(alone, together.split(q_lens)[row])
