"""The device seam: the one place that knows whether this process computes on `cpu` or `cuda`.

On CUDA nothing here changes anything. Without it, Megatron-core still names CUDA in places (device
arguments, streams, the CUDA random state); `prepare()` makes those names work on the CPU. It patches
process-wide, so it must run before the first Megatron import (importing `megatron_stare.engine` does
that) and again in every spawned process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.utils._device import _device_constructors


@dataclass(frozen=True)
class Device:
    """What a device decides: where tensors live and which collectives and layers are used."""

    kind: str
    backend: str
    layers: str
    dispatcher: str  # how tokens reach their experts: Megatron's alltoall needs CUDA streams

    @property
    def torch(self) -> torch.device:
        """The torch device of this process."""
        if self.kind == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


def current() -> Device:
    """The device of this process: CUDA where there is one, the CPU elsewhere."""
    if torch.cuda.is_available():
        return Device(kind="cuda", backend="nccl", layers="transformer_engine", dispatcher="alltoall")
    return Device(kind="cpu", backend="gloo", layers="local", dispatcher="allgather")


class _NoStream:
    """Stands for a CUDA stream or event: the CPU runs everything in order, so nothing is waited for."""

    def __init__(self, *_args, **_kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        return False

    def __getattr__(self, _name):
        return lambda *_args, **_kwargs: None

    def __eq__(self, other):
        return isinstance(other, _NoStream)

    def __hash__(self):
        return 0

    def record_event(self, *_args, **_kwargs):
        return _NoStream()


def _on_cpu(factory):
    """A tensor factory that reads `device="cuda"` as the CPU and drops pinning, which needs CUDA."""

    @functools.wraps(factory)
    def call(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


@functools.cache
def prepare() -> None:
    """Make Megatron-core importable and usable without CUDA. Does nothing where CUDA exists."""
    if torch.cuda.is_available():
        return
    _patch_torch()
    _patch_megatron()


def _patch_torch() -> None:
    # torch caches which functions make tensors by asking for them by name; filled after the wrapping it
    # would hold the wrappers, and transformers would mistake every load for one on the meta device.
    _device_constructors()
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda _device: None
    cuda.device_count = lambda: 1  # the asynchronous checkpoint writer asks
    cuda.synchronize = lambda *_args, **_kwargs: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.stream = lambda _stream: _NoStream()
    cuda.current_stream = cuda.default_stream = lambda *_args, **_kwargs: _NoStream()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    for name in ("tensor", "zeros", "ones", "empty", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self

    # DistributedDataParallel and the optimizers sort parameters by type strings such as
    # "torch.cuda.FloatTensor" and refuse others.
    plain_type = torch.Tensor.type
    torch.Tensor.type = lambda self, *args, **kwargs: (
        plain_type(self, *args, **kwargs)
        if args or kwargs
        else plain_type(self).replace("torch.", "torch.cuda.")
    )


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # named but never defined where Transformer Engine is absent

    # torch's Adam, used where neither Transformer Engine nor apex is, keeps a step for each parameter;
    # the resharding load does not carry it.
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def keep_step(self, model_param, tensors):
        now = self._get_main_param_and_optimizer_states(model_param)
        kept = {"step": now["step"]} if "step" in now else {}
        return set_states(self, model_param, {**kept, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = keep_step
