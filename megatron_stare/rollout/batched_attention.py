"""Causal attention of many sequences of different lengths over a paged cache, in few SDPA calls.

Sequences are sorted by length, cut into groups, padded within a group and handed to
one SDPA call a group. Pure torch; `cpu_attention.py` puts it into SGLang.

Dimensions: T tokens of the batch, S sequences, Q query positions, L key positions,
C slots of a table row, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_PADDED_KEYS = 1 << 16  # key positions gathered at once, padding included
MAX_MASK = 1 << 22  # elements of a group's [S, Q, L] mask


def extend(
    query_THD: torch.Tensor,
    output_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_SC: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    scaling: float | None = None,
    enable_gqa: bool = False,
    exact: bool = False,
) -> None:
    """Attention of each sequence's new tokens to itself. Writes `output_THD`.

    Args:
        query_THD: new tokens of all sequences, one sequence after the other.
        k_cache, v_cache: [slots, K, D], the new tokens' keys and values included.
        slots_SC: row s holds the cache slots of sequence s, in order; valid up to its length.
        seq_lens: [S], tokens of each sequence, the new ones included; all at least 1.
        prefix_lens: [S], tokens that were there before.
        exact: the result for a sequence is the same to the bit whatever sequences are beside it.
    """
    q_lens = seq_lens - prefix_lens
    starts = q_lens.cumsum(0) - q_lens
    for group_S in _groups(seq_lens, q_lens, exact):
        positions_Q = torch.arange(int(q_lens[group_S].max()))
        real_SQ = positions_Q[None, :] < q_lens[group_S, None]
        # A padded query repeats the sequence's first, so that no row of the mask is empty.
        offsets_SQ = torch.where(real_SQ, positions_Q[None, :], 0)
        rows_SQ = starts[group_S, None] + offsets_SQ
        last_key_SQ = prefix_lens[group_S, None] + offsets_SQ
        result_SQHD = _attend(
            query_THD[rows_SQ], k_cache, v_cache, slots_SC[group_S], seq_lens[group_S], last_key_SQ,
            scaling, enable_gqa,
        )  # fmt: skip
        output_THD[rows_SQ[real_SQ]] = result_SQHD[real_SQ]


def decode(
    query_SHD: torch.Tensor,
    output_SHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_SC: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scaling: float | None = None,
    enable_gqa: bool = False,
    exact: bool = False,
) -> None:
    """As extend(), for one new token a sequence."""
    for group_S in _groups(seq_lens, torch.ones_like(seq_lens), exact):
        lens = seq_lens[group_S]
        result_SQHD = _attend(
            query_SHD[group_S, None], k_cache, v_cache, slots_SC[group_S], lens, lens[:, None] - 1,
            scaling, enable_gqa,
        )  # fmt: skip
        output_SHD[group_S] = result_SQHD[:, 0]


def _attend(
    query_SQHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_SC: torch.Tensor,
    seq_lens: torch.Tensor,
    last_key_SQ: torch.Tensor,
    scaling: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention of each query to the keys of its sequence up to `last_key_SQ`. [S, Q, H, D]."""
    longest = int(seq_lens.max())
    keys_L = torch.arange(longest)
    # Slots past a sequence's end are left over from others: read its own first slot instead.
    slots_SL = torch.where(keys_L[None, :] < seq_lens[:, None], slots_SC[:, :longest], slots_SC[:, :1])
    key_SKLD = k_cache[slots_SL].to(query_SQHD.dtype).transpose(1, 2)
    value_SKLD = v_cache[slots_SL].to(query_SQHD.dtype).transpose(1, 2)
    mask_SQL = keys_L[None, None, :] <= last_key_SQ[:, :, None]
    result_SHQD = scaled_dot_product_attention(
        query_SQHD.transpose(1, 2),
        key_SKLD,
        value_SKLD,
        attn_mask=mask_SQL[:, None],
        scale=scaling,
        enable_gqa=enable_gqa,
    )
    return result_SHQD.transpose(1, 2)


def _groups(seq_lens: torch.Tensor, q_lens: torch.Tensor, exact: bool) -> Iterator[torch.Tensor]:
    """Indices of the sequences, shortest first, in groups within MAX_PADDED_KEYS and MAX_MASK.

    With `exact` all sequences of a group have equal lengths: nothing is padded, and the kernel, which takes
    them one by one, does for each what it would do for it alone.
    """
    # Among sequences of equal length those with equally many queries follow each other.
    order = torch.argsort(seq_lens * (int(q_lens.max()) + 1) + q_lens)
    lens, queries = seq_lens[order].tolist(), q_lens[order].tolist()
    begin, widest = 0, 0
    for end, (length, query) in enumerate(zip(lens, queries, strict=True)):
        padded = (end - begin + 1) * length
        widest = max(widest, query)
        too_large = padded > MAX_PADDED_KEYS or padded * widest > MAX_MASK
        other = exact and (length, query) != (lens[begin], queries[begin])
        if end > begin and (too_large or other):
            yield order[begin:end]
            begin, widest = end, query
    yield order[begin:]
