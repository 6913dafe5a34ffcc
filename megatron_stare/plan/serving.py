"""What the SGLang servers hold: weights and the KV cache; and what a weight update sends them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.config.schema import Config
from megatron_stare.plan.architecture import Architecture
from megatron_stare.plan.hardware import Hardware
from megatron_stare.plan.memory import dtype_bytes
from megatron_stare.plan.workload import Workload


@dataclass(frozen=True)
class Serving:
    """Bytes and tokens of one server (all its GPUs together, where not said otherwise)."""

    servers: int
    gpus: int
    weights_a_gpu: int
    kv_bytes_a_token: int
    kv_tokens: int
    full_length_responses: int
    mean_length_responses: int
    concurrent: int
    sync_bytes: int
    sync_seconds: float


def serving(config: Config, model: Architecture, hardware: Hardware, work: Workload) -> Serving:
    """The servers of `rollout`. `kv_tokens` is 0 where the weights alone do not fit."""
    rollout, hf = config.rollout, model.hf
    width = dtype_bytes(config)
    wire = 1 if rollout.wire == "fp8_blockwise" else width
    weights = model.parameters * wire // rollout.tp
    # Where there are fewer key-value heads than GPUs, SGLang keeps copies.
    heads = max(hf.num_kv_heads, rollout.tp)
    a_token = 2 * hf.num_layers * heads * hf.head_dim * width
    free = max(0, int(hardware.memory * rollout.memory_fraction) - weights) * rollout.tp
    tokens = free // a_token
    if rollout.max_total_tokens:
        tokens = min(tokens, rollout.max_total_tokens)
    servers = len(rollout.endpoints) or rollout.servers
    mean = tokens // (work.prompt_tokens + work.response_tokens)
    waiting = -(-work.responses // servers)
    return Serving(
        servers=servers,
        gpus=servers * rollout.tp,
        weights_a_gpu=weights,
        kv_bytes_a_token=a_token,
        kv_tokens=tokens,
        full_length_responses=tokens // rollout.context_length,
        mean_length_responses=mean,
        concurrent=max(0, min(rollout.max_running_requests, mean, waiting)),
        sync_bytes=model.parameters * wire,
        sync_seconds=model.parameters * wire / (hardware.network * hardware.link_efficiency),
    )
