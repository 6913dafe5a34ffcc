"""Megatron's data parallelism and optimizer around the policy, and the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class LearningRate:
    """Learning rate by update number, counted from 0: linear warm-up, then constant, linear or cosine."""

    peak: float
    floor: float = 0.0
    schedule: str = "constant"
    warmup: int = 0
    total: int = 1

    def __call__(self, update: int) -> float:
        """The rate of this update; the first one is already above zero."""
        if update < self.warmup:
            return self.peak * (update + 1) / self.warmup
        done = min(1.0, (update - self.warmup) / max(1, self.total - self.warmup))
        share = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
        return self.floor + (self.peak - self.floor) * share[self.schedule]


def wrap_data_parallel(
    models: list[torch.nn.Module], config: TransformerConfig, *, distributed_optimizer: bool, overlap: bool
) -> list[torch.nn.Module]:
    """Megatron's DDP around each stage; gradients are summed over replicas in float32."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.bf16,
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=overlap,
        # Parameters are exported right after the step, so gathering them lazily would only hide a wait and
        # risk exporting stale ones.
        overlap_param_gather=False,
        fp8_param_gather=config.fp8_param,
    )
    wrapped = [
        DistributedDataParallel(config, ddp, model, disable_bucketing=i > 0) for i, model in enumerate(models)
    ]
    if overlap:
        no_sync = [model.no_sync for model in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def finalize(model, num_tokens=None, **groups):
        finalize_model_grads(model, None, **groups)  # the loss is already divided by the global count

    config.finalize_model_grads_func = finalize
    return wrapped


def build_optimizer(
    models: list[torch.nn.Module],
    config: TransformerConfig,
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    clip_grad: float = 1.0,
    distributed: bool = False,
    offload: float = 0.0,
) -> MegatronOptimizer:
    """Megatron's Adam over `models`, which already hold the weights to start from.

    `offload`: the share of its states and float32 weights that stay in the host's memory and are updated
    there; needs CUDA and a distributed optimizer.
    """
    # Offloading keeps the float32 weights itself, which Megatron calls a precision-aware optimizer.
    offloading = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": offload,
        "use_precision_aware_optimizer": True,
        "overlap_cpu_optimizer_d2h_h2d": True,
    }
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=weight_decay,
            adam_beta1=betas[0],
            adam_beta2=betas[1],
            adam_eps=eps,
            clip_grad=clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed,
            **(offloading if offload else {}),
        ),
        models,
    )
    config.grad_scale_func = optimizer.scale_loss
    return optimizer
