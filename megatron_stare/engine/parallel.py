"""Process groups of a run, as one value that is passed around instead of looked up in globals."""

from __future__ import annotations

import datetime
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_stare.engine.context import Context
from megatron_stare.engine.device import Device


@dataclass(frozen=True)
class Parallel:
    """This rank's place in the run. `dp` counts data-parallel replicas; sizes and ranks are in processes."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    vpp_size: int | None
    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    ep_rank: int
    ep_size: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    device: torch.device
    cp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup  # the ranks among which a stage's tokens are shared out
    sequence_parallel: bool

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes log-probs."""
        return self.pp_rank == self.pp_size - 1

    @property
    def microbatch_multiple(self) -> int:
        """Megatron's interleaved schedule wants a number of microbatches that the pipeline divides."""
        return self.pp_size if self.vpp_size else 1

    @property
    def context(self) -> Context:
        """How sequences are cut over context-parallel ranks."""
        return Context(self.cp_rank, self.cp_size, self.cp_group)

    @property
    def length_multiple(self) -> int:
        """What the tokens of a microbatch, over its context-parallel ranks, must be a multiple of."""
        pieces = self.tp_size if self.sequence_parallel else 1
        return self.cp_size * math.lcm(2 if self.cp_size > 1 else 1, pieces)

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage in this rank's pipeline."""
        return dist.get_global_rank(self.pp_group, self.pp_size - 1)

    def from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` with the last stage's; collective over the pipeline. Shapes must be equal."""
        if self.pp_size > 1 and tensor.numel():
            dist.broadcast(tensor, self.last_stage_rank, group=self.pp_group)
        return tensor

    def scatter_to_replicas(self, shards: list[Any] | None) -> Any:
        """Send `shards[i]` (given on rank 0) to every rank of replica i; collective over all ranks."""
        placement: list[Any] = [None] * self.world_size
        dist.all_gather_object(placement, self.dp_rank)
        received = [None]
        outgoing = [shards[replica] for replica in placement] if self.rank == 0 else None
        dist.scatter_object_list(received, outgoing, src=0)
        return received[0]

    def largest(self, value: int) -> int:
        """The largest of the values that replicas give; collective."""
        box = torch.tensor([value], device=self.device)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.dp_cp_group)
        return int(box)

    def agree_on(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def initialize(
    device: Device,
    *,
    tp: int,
    pp: int,
    vpp: int | None = None,
    cp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    seed: int = 0,
    timeout_minutes: float = 60.0,
) -> Parallel:
    """Join the run's process groups (torchrun's environment; alone without it) and seed Megatron's RNG."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group(device.backend, timeout=datetime.timedelta(minutes=timeout_minutes))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,  # an expert is small: cutting it costs more than it saves
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
    )
    model_parallel_cuda_manual_seed(seed)
    return Parallel(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=tp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=pp,
        vpp_size=vpp,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=cp,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=ep,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        device=device.torch,
        cp_group=parallel_state.get_context_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        sequence_parallel=sequence_parallel,
    )


def leave_model_parallel() -> None:
    """Give up Megatron's groups, so that `initialize` can make others over the same processes."""
    parallel_state.destroy_model_parallel()


def shut_down() -> None:
    """Leave all process groups."""
    leave_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
