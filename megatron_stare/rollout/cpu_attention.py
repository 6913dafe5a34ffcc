"""SGLang's `torch_native` attention for CPUs, many sequences at a time.

SGLang's own loops over the sequences in Python, layer by layer: with 256 short
responses in flight that loop takes more than half of the server's time. Here the
sequences of a batch are sorted by length, cut into groups, padded within a group
and handed to one SDPA call a group. The results are those of the loop up to
rounding. Anything beyond plain causal attention goes to SGLang's code.

Dimensions: T tokens of the batch, S sequences, Q query positions, L key positions,
H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

MAX_PADDED_KEYS = 1 << 16  # key positions gathered at once, padding included
MAX_MASK = 1 << 22  # elements of a group's [S, Q, L] mask


class BatchedTorchNativeBackend(TorchNativeAttnBackend):
    """`torch_native` with one SDPA call a group of sequences instead of one a sequence."""

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        plain = options.get("causal") and encoder_lens is None and options.get("sliding_window_size") is None
        if not plain or seq_lens.shape[0] == 1:  # one sequence: SDPA's own causal path needs no mask
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                extend_prefix_lens, extend_seq_lens, encoder_lens, **options,
            )  # fmt: skip
        starts = extend_seq_lens.cumsum(0) - extend_seq_lens
        for group_S in _groups(seq_lens, extend_seq_lens):
            q_lens, prefixes = extend_seq_lens[group_S], extend_prefix_lens[group_S]
            positions_Q = torch.arange(int(q_lens.max()))
            real_SQ = positions_Q[None, :] < q_lens[:, None]
            # A padded query repeats the sequence's first, so that no row of the mask is empty.
            offsets_SQ = torch.where(real_SQ, positions_Q[None, :], 0)
            rows_SQ = starts[group_S][:, None] + offsets_SQ
            result_SQHD = self._attend(
                query[rows_SQ], k_cache, v_cache, req_to_token[req_pool_indices[group_S]], seq_lens[group_S],
                last_key_SQ=prefixes[:, None] + offsets_SQ, **options,
            )  # fmt: skip
            output[rows_SQ[real_SQ]] = result_SQHD[real_SQ]
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if encoder_lens is not None or options.get("sliding_window_size") is not None:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                encoder_lens, **options,
            )  # fmt: skip
        for group_S in _groups(seq_lens, torch.ones_like(seq_lens)):
            lens = seq_lens[group_S]
            result_SQHD = self._attend(
                query[group_S][:, None], k_cache, v_cache, req_to_token[req_pool_indices[group_S]], lens,
                last_key_SQ=lens[:, None] - 1, **options,
            )  # fmt: skip
            output[group_S] = result_SQHD[:, 0]
        return output

    @staticmethod
    def _attend(
        query_SQHD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots_SC: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        last_key_SQ: torch.Tensor,
        scaling: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
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
            query_SQHD.transpose(1, 2), key_SKLD, value_SKLD,
            attn_mask=mask_SQL[:, None], scale=scaling, enable_gqa=enable_gqa,
        )  # fmt: skip
        return result_SHQD.transpose(1, 2)


def _groups(seq_lens: torch.Tensor, q_lens: torch.Tensor) -> Iterator[torch.Tensor]:
    """Indices of the sequences, shortest first, in groups within MAX_PADDED_KEYS and MAX_MASK."""
    order = torch.argsort(seq_lens)
    lens, queries = seq_lens[order].tolist(), q_lens[order].tolist()
    begin, widest = 0, 0
    for end, (length, query) in enumerate(zip(lens, queries, strict=True)):
        count = end - begin + 1
        padded = count * length
        if count > 1 and (padded > MAX_PADDED_KEYS or padded * max(widest, query) > MAX_MASK):
            yield order[begin:end]
            begin, widest = end, 0
        widest = max(widest, query)
    yield order[begin:]


def register() -> None:
    """Make `--attention-backend torch_native` mean this class. SGLang allows few names on a CPU."""
    attention_registry.ATTENTION_BACKENDS["torch_native"] = BatchedTorchNativeBackend
