"""Megatron weights out as Hugging Face tensors, streamed to one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_stare.errors import UserError
from megatron_stare.weights.hf_config import HFConfig
from megatron_stare.weights.layouts import Replicated
from megatron_stare.weights.mapping import (
    Entry,
    check_tied,
    global_parameters,
    match_entries,
    model_entries,
)


def iter_hf_weights(
    models: Sequence[nn.Module],
    hf_config: HFConfig,
    *,
    tp_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    participate: bool = True,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor | None]]:
    """The model's tensors under their Hugging Face names, complete on the destination rank.

    A collective over one replica of the model. The destination is the replica's first tensor-parallel
    rank on the first pipeline stage: global rank 0 for the data-parallel (and context-parallel) replica
    that contains it. Parameter by parameter the owning stage gathers its shards to its first
    tensor-parallel rank, which sends them to the destination; so at most one parameter and its tensors
    exist beside the model. Tied embeddings come once, as the embedding.

    Iterate to the end on every rank, also when the consumer fails: the other ranks wait in a gather.
    With overlapped parameter gathering, finish that first: parameters read before are stale.

    Args:
        models: the rank's GPTModel chunks, wrapped or not.
        tp_group, pp_group: Megatron's groups; None for a group of one.
        participate: False on ranks of other replicas (data-parallel rank or context-parallel rank not
            0), which then yield nothing.
        dtype: cast to it; default: the dtype of the rank's first parameter.

    Yields:
        (name, tensor) in the same order on all participating ranks; the tensor is on the model's device,
        contiguous, and shares no memory with the model. None except on the destination.

    Raises:
        UserError: the models do not have the parameters or shapes of `hf_config`, or no pipeline stage
            holds some parameter.
    """
    if not participate:
        return
    tp_size = 1 if tp_group is None else tp_group.size()
    check_tied(models, hf_config)
    every = model_entries(hf_config)
    held = {entry.names: p for entry, p in match_entries(every, global_parameters(models), tp_size)}
    entries = [entry for entry in every if not entry.copy]
    parameter = next(iter(held.values()))
    link = _Link(entries, held, tp_group, pp_group, dtype or parameter.dtype, parameter.device)
    for index, entry in enumerate(entries):
        tensors = link.collect(index, entry)
        for i, name in enumerate(entry.hf):
            yield name, None if tensors is None else tensors[i]
        del tensors  # else the next parameter is gathered while this one is still held


class _Link:
    """The way of one parameter from its shards to the destination."""

    def __init__(
        self,
        entries: list[Entry],
        held: dict[tuple[str, ...], nn.Parameter],
        tp_group: dist.ProcessGroup | None,
        pp_group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.held = held
        self.tp_group, self.pp_group = tp_group, pp_group
        self.tp_ranks = [] if tp_group is None else dist.get_process_group_ranks(tp_group)
        self.pp_ranks = [] if pp_group is None else dist.get_process_group_ranks(pp_group)
        self.tp_rank = 0 if tp_group is None else tp_group.rank()
        self.stage = 0 if pp_group is None else pp_group.rank()
        self.dtype, self.device = dtype, device
        self.owners = self._owners(entries)

    def _owners(self, entries: list[Entry]) -> list[int]:
        """The pipeline stage of each entry, agreed on by asking: any placement of layers is understood."""
        mine = [self.stage if entry.names in self.held else -1 for entry in entries]
        if self.pp_group is not None and len(self.pp_ranks) > 1:
            owners = torch.tensor(mine, device=self.device)
            dist.all_reduce(owners, dist.ReduceOp.MAX, group=self.pp_group)
            mine = owners.tolist()
        lost = [entry.names[0] for entry, owner in zip(entries, mine, strict=True) if owner < 0]
        if lost:
            raise UserError(f"no pipeline stage holds the Megatron parameter {lost[0]} ({len(lost)} such)")
        return mine

    def collect(self, index: int, entry: Entry) -> tuple[Tensor, ...] | None:
        """Take part in moving one entry; its Hugging Face tensors on the destination, None elsewhere."""
        owner = self.owners[index]
        if self.stage not in (owner, 0):
            return None
        merged = self._gather(entry) if self.stage == owner else None
        if self.tp_rank != 0:
            return None
        if self.stage == 0:
            return merged if owner == 0 else self._receive(entry, self.pp_ranks[owner])
        for tensor in merged:
            dist.send(tensor, self.pp_ranks[0], group=self.pp_group)
        return None

    def _gather(self, entry: Entry) -> tuple[Tensor, ...] | None:
        shard = self.held[entry.names].detach()
        shards = [shard]
        if len(self.tp_ranks) > 1 and not isinstance(entry.layout, Replicated):
            shard = shard.to(self.dtype).contiguous()
            shards = [torch.empty_like(shard) for _ in self.tp_ranks] if self.tp_rank == 0 else None
            dist.gather(shard, shards, dst=self.tp_ranks[0], group=self.tp_group)
        if self.tp_rank != 0:
            return None
        return tuple(self._own(t, shard) for t in entry.layout.merge(shards))

    def _own(self, tensor: Tensor, shard: Tensor) -> Tensor:
        """Contiguous, cast, and not the parameter's memory, which the next optimizer step changes."""
        tensor = tensor.to(self.dtype).contiguous()
        same = tensor.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        return tensor.clone() if same else tensor

    def _receive(self, entry: Entry, source: int) -> tuple[Tensor, ...]:
        tensors = tuple(
            torch.empty(shape, dtype=self.dtype, device=self.device) for shape in entry.layout.hf_shapes
        )
        for tensor in tensors:
            dist.recv(tensor, source, group=self.pp_group)
        return tensors
