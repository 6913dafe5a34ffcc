"""A rank of a large run in this process: a fake process group, and tensors without memory.

Everything that the engine builds and runs in here is the engine's own code; only the tensors are on torch's
`meta` device (shapes, dtypes and storages, no data), and collectives return at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import FakeWork
from torch.distributed._tools import fake_collectives  # noqa: F401  registers collectives of meta tensors
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_stare.config.schema import ParallelSection
from megatron_stare.engine.device import Device
from megatron_stare.engine.parallel import Parallel, initialize, leave_model_parallel

META = torch.device("meta")
_TYPES = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}


# Those that DistributedDataParallel calls for several buffers at once are not among the registered ones.
_COALESCED = torch.library.Library("c10d", "IMPL")
for _name in ("reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_", "allreduce_coalesced_"):
    _COALESCED.impl(_name, lambda *_args, **_kwargs: FakeWork().boxed(), "Meta")


@dataclass(frozen=True)
class MetaDevice(Device):
    """The device seam's description of a rank that only exists on paper."""

    @property
    def torch(self) -> torch.device:
        """Where its tensors are."""
        return META


def meta_device() -> MetaDevice:
    """As the CPU's, with collectives that reach nobody."""
    return MetaDevice(kind="cpu", backend="fake", layers="local", dispatcher="allgather")


class OnMeta(TorchFunctionMode):
    """Makes every new tensor a meta tensor, and answers the few questions that need data.

    `if tensor.any()` is answered with yes: the branch that does something is planned for. Attention is
    computed by the flash kernel's shape function, because on the meta device torch would choose the one that
    keeps the matrix of scores.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        name = getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention:
            return _flash_attention(*args, **kwargs)
        if func is torch.autograd.backward:
            with META, self:  # a mode is off while it handles a call, and this call runs much more
                return _backward(*args, **kwargs)
        if isinstance(first, torch.Tensor) and first.device.type == "meta":
            if name == "__bool__":
                return True
            if name == "item" and not first.is_floating_point():
                return 1  # Megatron passes the kind of attention mask as a tensor; our attention ignores it
            if name == "cuda":
                return first
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                # Megatron sorts parameters by these names. On a CPU device.py's wrapper adds "cuda.".
                return f"torch.{'cuda.' if torch.cuda.is_available() else ''}{_TYPES[first.dtype]}Tensor"
            if name == "to":
                args = tuple(META if _is_device(arg) else arg for arg in args)
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        return func(*args, **kwargs)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.startswith(("cpu", "cuda")))


def _backward(tensors, grad_tensors=None, **_unused) -> None:
    """torch.autograd.backward without its hand-over to function modes, which would call us again."""
    tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    grads = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else tuple(grad_tensors)
    torch.autograd.graph._engine_run_backward(
        tensors, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _flash_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_gqa):
    mask = None if attn_mask is None else attn_mask.expand(query.shape[0], 1, -1, -1).to(query.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
    )[0]


@contextlib.contextmanager
def rank_of(layout: ParallelSection, world_size: int, rank: int) -> Iterator[tuple[Parallel, MetaDevice]]:
    """This process as rank `rank` of `world_size`, in Megatron's groups of `layout`, with meta tensors."""
    if dist.is_initialized():
        raise RuntimeError("a plan needs a process of its own: this one is already in a process group")
    device, environment, on_error = meta_device(), dict(os.environ), sys.excepthook
    with torch.random.fork_rng(devices=[]), _nobody_else():
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            parallel = initialize(device, **layout.groups)
            with META, OnMeta():
                yield parallel, device
        finally:
            leave_model_parallel()
            dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(environment)
            sys.excepthook = on_error  # torch.distributed puts "[rank0]" before every line of a traceback


@contextlib.contextmanager
def _nobody_else() -> Iterator[None]:
    """Makes what torch.distributed would ask other processes answer alone, within the block."""
    new_group, gather = dist.new_group, dist.all_gather_object

    def fake_group(*args, **kwargs):  # Megatron asks for gloo groups by name
        return new_group(*args, **{**kwargs, "backend": "fake"})

    def same_everywhere(answers, mine, group=None):  # Megatron compares its groups of parameters
        answers[:] = [mine] * len(answers)

    dist.new_group, dist.all_gather_object = fake_group, same_everywhere
    try:
        yield
    finally:
        dist.new_group, dist.all_gather_object = new_group, gather


def to_meta(value: Any) -> Any:
    """A dataclass of tensors (a packed microbatch) on the meta device.

    Cumulative lengths keep their data: Megatron's rotary embedding reads them.
    """
    if isinstance(value, torch.Tensor):
        return value.to(META)
    if isinstance(value, (list, tuple)):
        return type(value)(to_meta(item) for item in value)
    if dataclasses.is_dataclass(value):
        copy = dataclasses.replace(value)
        for field in dataclasses.fields(value):
            if not field.name.startswith("cu_seqlens"):
                object.__setattr__(copy, field.name, to_meta(getattr(value, field.name)))
        return copy
    return value
