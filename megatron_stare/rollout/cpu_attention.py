"""SGLang's `torch_native` attention for CPUs, many sequences at a time.

SGLang's own loops over the sequences in Python, layer by layer: with 256 short
responses in flight that takes more than half of the server's time. The results
here are those of the loop up to rounding. Anything beyond plain causal attention
goes to SGLang's code.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from megatron_stare.rollout import batched_attention


class BatchedTorchNativeBackend(TorchNativeAttnBackend):
    """`torch_native` with one SDPA call a group of sequences instead of one a sequence.

    `exact` groups sequences of equal lengths only, so that a result does not depend on the rest of the batch.
    """

    exact = False

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
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        plain = causal and encoder_lens is None and options.get("sliding_window_size") is None
        # One sequence: SDPA's own causal path needs no mask, but it differs in the last bits.
        if not plain or (seq_lens.shape[0] == 1 and not self.exact):
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, encoder_lens,
                scaling=scaling, enable_gqa=enable_gqa, causal=causal, **options,
            )  # fmt: skip
        slots = req_to_token[req_pool_indices, : int(seq_lens.max())]
        batched_attention.extend(
            query, output, k_cache, v_cache, slots, seq_lens, extend_prefix_lens,
            scaling=scaling, enable_gqa=enable_gqa, exact=self.exact,
        )  # fmt: skip
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
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if encoder_lens is not None or options.get("sliding_window_size") is not None:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling=scaling, enable_gqa=enable_gqa, causal=causal, **options,
            )  # fmt: skip
        slots = req_to_token[req_pool_indices, : int(seq_lens.max())]
        batched_attention.decode(
            query, output, k_cache, v_cache, slots, seq_lens,
            scaling=scaling, enable_gqa=enable_gqa, exact=self.exact,
        )  # fmt: skip
        return output


def register(*, exact: bool) -> None:
    """Make `--attention-backend torch_native` mean this class. SGLang allows few names on a CPU."""
    BatchedTorchNativeBackend.exact = exact
    attention_registry.ATTENTION_BACKENDS["torch_native"] = BatchedTorchNativeBackend
