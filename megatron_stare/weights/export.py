"""Megatron weights out as Hugging Face tensors, streamed to the ranks that want them.

Every rank walks through the model's parameters in one order. For each, the ranks that hold its shards send
them to one destination, which puts them together. The next parameters are on their way meanwhile, within a
bound of bytes, so gathering, casting and what the consumer does with a tensor overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_stare.errors import UserError
from megatron_stare.weights.hf_config import HFConfig
from megatron_stare.weights.layouts import Replicated, Vocab
from megatron_stare.weights.mapping import (
    Entry,
    check_tied,
    global_parameters,
    match_entries,
    model_entries,
)
from megatron_stare.weights.stream import TensorSpec

_IN_FLIGHT_BYTES = 64 << 20


class Exporter:
    """Knows where every parameter of a model lies, and brings parameters together.

    All methods are collective over all ranks of the run. With overlapped parameter gathering, finish that
    first: parameters read before are stale.

    Args:
        models: the rank's chunks of the model, wrapped or not.
        tp_rank, tp_size: this rank's place in its tensor-parallel group.
        dtype: what the tensors are cast to, before they are sent; default: that of the parameters.

    Attributes:
        entries: what can be collected, in Hugging Face's order; tied embeddings once, as the embedding.

    Raises:
        UserError: the models do not have the parameters or shapes of `hf_config`, or some parameter is on
            no rank.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        hf_config: HFConfig,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_tied(models, hf_config)
        every = model_entries(hf_config)
        held = {entry.names: p for entry, p in match_entries(every, global_parameters(models), tp_size)}
        self.entries = [entry for entry in every if not entry.copy]
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        parameter = next(iter(held.values()))
        self.dtype, self._device = dtype or parameter.dtype, parameter.device
        self._held = held
        self._tp_size = tp_size
        self._holders = self._find_holders(tp_rank)

    def specs(self, entry: Entry) -> list[TensorSpec]:
        """Names, shapes and dtypes of an entry's tensors, known without collecting them."""
        return [TensorSpec(name, shape, self.dtype) for name, shape in entry.hf_tensors]

    def holders(self, entry: Entry) -> list[int]:
        """The global ranks that hold a shard of an entry."""
        return [rank for ranks in self._holders[entry.names] for rank in ranks]

    def to_rank_0(self, share: bool = False) -> Iterator[tuple[str, Tensor | None]]:
        """All tensors under their Hugging Face names, complete on global rank 0, None elsewhere.

        Iterate to the end on every rank, also when the consumer fails. `share`: see `collect`.
        """
        for entry, tensors in self.collect(((entry, 0) for entry in self.entries), share):
            for i, name in enumerate(entry.hf):
                yield name, None if tensors is None else tensors[i]
            del tensors  # else it is held while the next one is put together

    def collect(
        self, wanted: Iterable[tuple[Entry, int]], share: bool = False
    ) -> Iterator[tuple[Entry, tuple[Tensor, ...] | None]]:
        """Entries, each put together on one rank.

        Args:
            wanted: (entry, global rank of its destination); the same on all ranks, in the same order.
            share: tensors may be the parameters' own memory, which saves a copy and which the next
                optimizer step changes.

        Yields:
            (entry, its Hugging Face tensors): on the model's device, contiguous, sharing no memory with the
            model (unless `share`), and None except on the destination.
        """
        moving: deque[_Move] = deque()
        in_flight = 0
        for entry, destination in wanted:
            moving.append(self._start(entry, destination))
            in_flight += moving[-1].nbytes
            while in_flight > _IN_FLIGHT_BYTES:
                in_flight -= moving[0].nbytes
                yield self._finish(moving.popleft(), share)
        while moving:
            yield self._finish(moving.popleft(), share)

    def _find_holders(self, tp_rank: int) -> dict[tuple[str, ...], list[list[int]]]:
        """By entry: for each tensor-parallel shard the ranks that hold it, agreed on by asking all."""
        vocabularies = {entry.names for entry in self.entries if isinstance(entry.layout, Vocab)}
        rows = [p.shape[0] for names, p in self._held.items() if names in vocabularies]
        parts = [self._part(entry, tp_rank) if entry.names in self._held else -1 for entry in self.entries]
        mine = torch.tensor([max(rows, default=0), *parts], dtype=torch.int32, device=self._device)
        world = dist.get_world_size() if dist.is_initialized() else 1
        table = [torch.empty_like(mine) for _ in range(world)] if world > 1 else [mine]
        if world > 1:
            dist.all_gather(table, mine)
        table_RE = torch.stack(table).tolist()
        # The padding of the vocabulary, which ranks without an embedding cannot know.
        self._vocab_rows = max(row.pop(0) for row in table_RE)
        holders = {}
        for number, entry in enumerate(self.entries):
            ranks_of: list[list[int]] = [[] for _ in range(self._parts(entry))]
            for rank, parts in enumerate(table_RE):
                if parts[number] >= 0:
                    ranks_of[parts[number]].append(rank)
            if not all(ranks_of):
                raise UserError(f"no rank holds the Megatron parameter {entry.names[0]}, or a part of it")
            holders[entry.names] = ranks_of
        return holders

    def _parts(self, entry: Entry) -> int:
        return 1 if isinstance(entry.layout, Replicated) else entry.tp_size(self._tp_size)

    def _part(self, entry: Entry, tp_rank: int) -> int:
        return tp_rank % self._parts(entry)

    def _start(self, entry: Entry, destination: int) -> _Move:
        """Send this rank's shard, or make room for the others', without waiting."""
        move = _Move(entry, destination)
        for ranks in self._holders[entry.names]:
            # The destination's own shard where it has one; else spread the sending over the replicas.
            source = destination if destination in ranks else ranks[destination % len(ranks)]
            if self.rank == source:
                shard = self._held[entry.names].detach().to(self.dtype).contiguous()
                if destination != self.rank:
                    move.works.append(dist.isend(shard, destination))
                move.shards.append(shard)
            elif self.rank == destination:
                room = torch.empty(self._shard_shape(entry), dtype=self.dtype, device=self._device)
                move.works.append(dist.irecv(room, source))
                move.shards.append(room)
        return move

    def _shard_shape(self, entry: Entry) -> tuple[int, ...]:
        shape = entry.layout.shard_shape(entry.tp_size(self._tp_size))
        return (self._vocab_rows, *entry.layout.hf_shapes[0][1:]) if shape is None else shape

    def _finish(self, move: _Move, share: bool) -> tuple[Entry, tuple[Tensor, ...] | None]:
        for work in move.works:
            work.wait()
        if self.rank != move.destination:
            return move.entry, None
        parameter = None if share else self._held.get(move.entry.names)
        tensors = move.entry.layout.merge(move.shards)
        return move.entry, tuple(_own(tensor, parameter) for tensor in tensors)


@dataclass
class _Move:
    """One entry on its way: this rank's part in it."""

    entry: Entry
    destination: int
    works: list[dist.Work] = field(default_factory=list)
    shards: list[Tensor] = field(default_factory=list)  # kept until they are sent; in order where received

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def _own(tensor: Tensor, parameter: Tensor | None) -> Tensor:
    """Contiguous, and not the parameter's memory, which the next optimizer step changes."""
    tensor = tensor.contiguous()
    if parameter is None:
        return tensor
    same = tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    return tensor.clone() if same else tensor
