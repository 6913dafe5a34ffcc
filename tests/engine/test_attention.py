"""Packed attention against each sequence computed alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_stare.engine.attention import PackedAttention, PackedSequences

CPU = torch.device("cpu")


def attention(heads: int, channels: int) -> PackedAttention:
    config = SimpleNamespace(kv_channels=channels, num_attention_heads=heads)
    return PackedAttention(config, 1, None, None)


@pytest.mark.parametrize("lengths", [[7], [1, 1, 1], [16, 3, 9, 9, 1, 31]])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_packed_equals_separate_with_gradients(lengths, kv_heads):
    generator = torch.Generator().manual_seed(1)
    total, heads, channels = sum(lengths), 4, 8
    q, k, v = (
        torch.randn(total, h, channels, generator=generator, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    upstream = torch.randn(total, heads * channels, generator=generator)
    packed = PackedSequences.of_lengths(lengths, CPU)
    out = attention(heads, channels)(q, k, v, packed_seq_params=packed)
    (out * upstream).sum().backward()
    grads = [x.grad.clone() for x in (q, k, v)]

    for x in (q, k, v):
        x.grad = None
    parts, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = F.scaled_dot_product_attention(
            *(x[rows].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=kv_heads != heads
        )
        parts.append(alone[0].transpose(0, 1).reshape(length, -1))
        start += length
    expected = torch.cat(parts)
    (expected * upstream).sum().backward()

    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for mine, x in zip(grads, (q, k, v), strict=True):
        torch.testing.assert_close(mine, x.grad, rtol=1e-4, atol=1e-5)


def test_unpacked_input_is_refused():
    with pytest.raises(ValueError, match="packed sequences only"):
        attention(2, 4)(*(torch.zeros(3, 2, 4) for _ in range(3)))
