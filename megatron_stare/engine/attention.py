"""Layers for Megatron's `local` spec: attention over packed sequences by torch SDPA, and a norm.

Shapes: T tokens of all packed sequences, A attention heads, K key-value heads, D channels a head,
N sequences in a bucket, L its longest sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters and the buckets in which SDPA computes them.

    `bucket_rows[i]` (int64 [N, L]) holds the packed row of each token of a bucket, padded with any row;
    `unbucket` (int64 [T]) finds each packed row among the flattened buckets.
    """

    bucket_rows: list[torch.Tensor] = field(default_factory=list)
    unbucket: torch.Tensor | None = None

    @classmethod
    def of_lengths(cls, lengths: list[int], device: torch.device) -> PackedSequences:
        """Describe sequences of these lengths, laid end to end."""
        ends = torch.tensor(lengths).cumsum(0)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        cu_seqlens = offsets.to(device=device, dtype=torch.int32)
        longest = max(lengths)
        rows, unbucket = _buckets(lengths, offsets)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            bucket_rows=[bucket.to(device) for bucket in rows],
            unbucket=unbucket.to(device),
        )


def _buckets(lengths: list[int], offsets: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Group sequences whose lengths share a power of two, so that padding at most doubles the work."""
    members: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        members.setdefault(max(length - 1, 0).bit_length(), []).append(i)
    sizes = torch.tensor(lengths)
    unbucket = torch.empty(int(offsets[-1]), dtype=torch.int64)
    buckets, start = [], 0
    for _, chosen in sorted(members.items()):
        index = torch.tensor(chosen)
        longest = int(sizes[index].max())
        column = torch.arange(longest)
        real = column < sizes[index, None]
        rows = torch.where(real, offsets[index, None] + column, 0)
        unbucket[rows[real]] = start + torch.arange(rows.numel()).view_as(rows)[real]
        buckets.append(rows)
        start += rows.numel()
    return buckets, unbucket


class PackedAttention(MegatronModule):
    """Megatron `core_attention`: causal attention within each packed sequence, with grouped queries.

    A bucket's sequences are padded on the right. Under a causal mask a real token never sees the padding
    behind it, so no mask tensor is needed and padded rows are simply not read back.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_unused):
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedSequences | None = None,
        **_unused,
    ) -> torch.Tensor:
        """query [T, A, D], key and value [T, K, D] to [T, A * D]."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention computes packed sequences only: pass PackedSequences")
        outputs = [
            self._bucket(query[rows], key[rows], value[rows]) for rows in packed_seq_params.bucket_rows
        ]
        return torch.cat(outputs)[packed_seq_params.unbucket]

    def _bucket(self, query_NLAD, key_NLKD, value_NLKD) -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            query_NLAD.transpose(1, 2),
            key_NLKD.transpose(1, 2),
            value_NLKD.transpose(1, 2),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query_NLAD.shape[2] != key_NLKD.shape[2],
        )
        n, heads, length, channels = out.shape
        return out.transpose(1, 2).reshape(n * length, heads * channels)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that works under sequence parallelism, which Megatron's torch norm refuses.

    Each rank then normalises its part of the sequence, so the weight's gradient is partial; the mark
    makes Megatron sum it over the tensor-parallel ranks.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_unused):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
