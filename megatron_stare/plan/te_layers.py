"""Stand-ins for what cannot run without CUDA or without data: Transformer Engine's layers, and experts.

A plan for GPUs puts these into the model that the engine built. They allocate and keep for the backward pass
what the real ones do, as far as their sources say: **assumptions, not measurements.**

- Norms keep their input and one float32 a row (the local norm keeps float32 copies of bf16 input).
- Core attention keeps queries, keys, values, output and one float32 a row and head: no score matrix, no
  padding to the longest sequence.
- Experts get equally many tokens each, over an all-to-all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.autograd.function import once_differentiable

from megatron_stare.engine.attention import PackedAttention, RMSNorm


def as_on_gpu(models: Iterable[torch.nn.Module]) -> None:
    """Make the models' norms and core attention allocate as Transformer Engine's."""
    for model in models:
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.forward = functools.partial(_norm, module)
            elif isinstance(module, PackedAttention):
                module.forward = _attend


def balance_experts(models: Iterable[torch.nn.Module]) -> None:
    """Send equally many tokens to each expert: which tokens go where would need data."""
    for model in models:
        for module in model.modules():
            if isinstance(module, MoELayer):
                module.forward = functools.partial(_experts, module)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _norm(module: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return _Norm.apply(x, module.weight)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_TAD, key_TKD, value_TKD):
        out = query_TAD.new_empty((query_TAD.shape[0], query_TAD.shape[1] * value_TKD.shape[2]))
        ctx.save_for_backward(
            query_TAD, key_TKD, value_TKD, out, query_TAD.new_empty(query_TAD.shape[:2], dtype=torch.float32)
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _FromAllRanks(torch.autograd.Function):
    """Keys and values of all context-parallel ranks pass through, as in Transformer Engine's all-gather."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        gathered = tensor.new_empty((tensor.shape[0] * group.size(), *tensor.shape[1:]))
        torch.distributed.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
        return tensor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        whole = grad.new_empty((grad.shape[0] * ctx.group.size(), *grad.shape[1:]))
        part = torch.empty_like(grad)
        torch.distributed.reduce_scatter_tensor(part, whole, group=ctx.group)
        return part, None


def _attend(query, key, value, attention_mask=None, attn_mask_type=None, packed_seq_params=None, **_unused):
    context = packed_seq_params.context
    if context.size > 1:
        key, value = (_FromAllRanks.apply(tensor, context.group) for tensor in (key, value))
    return _Attention.apply(query, key, value)


def _experts(module: MoELayer, hidden_states: torch.Tensor, *_args, **_kwargs):
    probs_TE, _ = module.router(hidden_states)
    hidden_TH = hidden_states.flatten(0, -2)
    tokens, chosen = len(hidden_TH), module.config.moe_router_topk
    index = torch.empty(tokens * chosen, dtype=torch.int64)
    group = module.ep_group
    sent_SH = hidden_TH.index_select(0, index)
    probs_S = probs_TE.flatten()[: tokens * chosen]
    if group.size() > 1:
        sent_SH, probs_S = all_to_all(group, sent_SH), all_to_all(group, probs_S)
    local = module.num_local_experts
    shares = [len(sent_SH) // local + (i < len(sent_SH) % local) for i in range(local)]
    counts = torch.tensor(shares) if local == 1 else _Counts(shares)
    output_SH, _ = module.experts(sent_SH, counts, probs_S)
    if group.size() > 1:
        output_SH = all_to_all(group, output_SH)
    combined_TH = torch.zeros_like(hidden_TH).index_add(0, index, output_SH)
    return combined_TH.view_as(hidden_states), None


class _Counts(list):
    """Numbers of tokens that answer `.tolist()`, as a meta tensor cannot."""

    def tolist(self) -> list[int]:
        return list(self)
