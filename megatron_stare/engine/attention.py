"""Layers for Megatron's `local` spec: attention over packed sequences by torch SDPA, and a norm.

Shapes: T tokens of all packed sequences on this rank, A attention heads, K key-value heads, D channels a
head; of a bucket N sequences, L queries and K keys each.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from megatron_stare.engine.context import WHOLE, Context


@dataclass
class Bucket:
    """Chunks of sequences that SDPA computes together.

    `queries` (int64 [N, L]) holds the packed row of each token, padded with any row; `keys` (int64 [N, K])
    the rows that those see, among the rows of all context-parallel ranks, rank after rank. `visible` (bool
    [N, 1, L, K]) says which key a query sees; None where query l sees keys 0 to l.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    visible: torch.Tensor | None

    def to(self, device: torch.device) -> Bucket:
        """The same on `device`."""
        visible = None if self.visible is None else self.visible.to(device)
        return Bucket(self.queries.to(device), self.keys.to(device), visible)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters and the buckets in which SDPA computes them.

    `unbucket` (int64 [T]) finds each packed row of this rank among the flattened buckets' queries.
    """

    buckets: list[Bucket] = field(default_factory=list)
    unbucket: torch.Tensor | None = None
    context: Context = WHOLE

    @classmethod
    def of_lengths(
        cls, lengths: list[int], device: torch.device, context: Context = WHOLE
    ) -> PackedSequences:
        """Describe sequences of these lengths, laid end to end; with `context`, padded to its multiple."""
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device)
        longest = max(lengths)
        buckets, unbucket = _buckets(lengths, context)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            buckets=[bucket.to(device) for bucket in buckets],
            unbucket=unbucket.to(device),
            context=context,
        )


def _buckets(lengths: list[int], context: Context) -> tuple[list[Bucket], torch.Tensor]:
    """Group chunks whose lengths share a power of two, so that padding at most doubles the work."""
    members: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        members.setdefault(max(length // context.multiple - 1, 0).bit_length(), []).append(i)
    local = torch.tensor(lengths) // context.size
    offsets = local.cumsum(0) - local
    unbucket = torch.empty(int(local.sum()), dtype=torch.int64)
    buckets, start = [], 0
    for _, group in sorted(members.items()):
        size, offset = (x[torch.tensor(group), None] for x in (local // len(context.chunks), offsets))
        for half, chunk in enumerate(context.chunks):
            column = torch.arange(int(size.max()))
            real = column < size
            queries = torch.where(real, offset + half * size + column, 0)
            unbucket[queries[real]] = start + torch.arange(queries.numel()).view_as(queries)[real]
            start += queries.numel()
            position = torch.arange(int(size.max()) * (chunk + 1))
            rows = _gathered_rows(position, size, offset, len(unbucket), context)
            keys = torch.where(position < size * (chunk + 1), rows, 0)
            visible = position <= (chunk * size + column)[..., None] if chunk else None
            buckets.append(Bucket(queries, keys, None if visible is None else visible[:, None]))
    return buckets, unbucket


def _gathered_rows(position, size, offset, rows: int, context: Context) -> torch.Tensor:
    """Where tokens of a sequence lie once the ranks' `rows` tokens each are gathered, rank after rank.

    `position` [K] is a token's place in its sequence; `size` and `offset` [N, 1] are the length of the
    sequence's chunks and its first row on a rank. Positions beyond the sequence give any row.
    """
    if context.size == 1:
        return offset + position
    chunk = position // size
    second = chunk >= context.size
    rank = torch.where(second, 2 * context.size - 1 - chunk, chunk)
    return rank * rows + offset + second * size + position % size


class PackedAttention(MegatronModule):
    """Megatron `core_attention`: causal attention within each packed sequence, with grouped queries.

    A bucket's sequences are padded on the right. Under a causal mask a real token never sees the padding
    behind it, and padded rows are simply not read back. With context parallelism every rank gathers the keys
    and values of all, and their gradient goes back to the ranks that they came from.
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
        context = packed_seq_params.context
        if context.size > 1:
            both = gather_from_sequence_parallel_region(torch.stack([key, value], 1), group=context.group)
            key, value = both.unbind(1)
        outputs = [self._bucket(query, key, value, bucket) for bucket in packed_seq_params.buckets]
        return torch.cat(outputs)[packed_seq_params.unbucket]

    def _bucket(self, query, key, value, bucket: Bucket) -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            query[bucket.queries].transpose(1, 2),
            key[bucket.keys].transpose(1, 2),
            value[bucket.keys].transpose(1, 2),
            attn_mask=bucket.visible,
            is_causal=bucket.visible is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
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
