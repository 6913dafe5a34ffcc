"""Watches what a program allocates and sends: bytes alive at once, and collectives by kind of group."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracker(TorchDispatchMode):
    """Counts the storages that operations make and that are still alive; those in `known` are not counted.

    `peak` is the largest sum of their bytes; `sent` the bytes that this rank sends, by name of the group
    (`groups`: name and ranks; other groups count as "other") and, in `links`, the ranks of that group.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), groups: Iterable[tuple[str, list[int]]] = ()):
        super().__init__()
        # Storages are told apart by their address; these are held so that none is used twice.
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen = {storage._cdata for storage in self._known}
        self._names = {tuple(ranks): name for name, ranks in groups}
        self.alive = self.peak = 0
        self.sent: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count_collective(func, args)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, address: int, nbytes: int) -> None:
        self._seen.discard(address)
        self.alive -= nbytes

    def _count_collective(self, func, args) -> None:
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg)), None)
        if group is None:
            return
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
        kind, size = func._schema.name.removeprefix("c10d::").strip("_"), len(ranks)
        tensors = [[t.nbytes for t in tree_leaves(arg) if isinstance(t, torch.Tensor)] for arg in args]
        largest = max((sum(sizes) for sizes in tensors if sizes), default=0)
        factor = {"allreduce": 2 * (size - 1) / size, "send": 1.0, "recv": 0.0, "barrier": 0.0}
        self.sent[self._names.get(tuple(ranks), "other")] += largest * factor.get(kind, (size - 1) / size)


def _is_group(value: torch.ScriptObject) -> bool:
    return value._type().name() == "ProcessGroup"


class SavedTensors:
    """Bytes that autograd keeps for the backward pass, each storage once; those of `known` are not counted.

    Use as a context around the forward pass.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()):
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._storages[storage._cdata] = storage
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes seen so far."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def release(self) -> None:
        """Let the storages go; `nbytes` is 0 afterwards."""
        self._storages.clear()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, each storage once."""
    storages = {s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
