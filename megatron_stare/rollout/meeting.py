"""Rank 0's side of making the process group of a weight update."""

from __future__ import annotations

import socket
import traceback
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_stare.rollout.endpoints import RolloutError
from megatron_stare.rollout.threads import in_thread

# All come within milliseconds once they are told. Where one dies meanwhile, the others wait in vain for as
# long as the store lives, and that is until this side gives up.
MEETING_SECONDS = 20.0


def meet(
    host: str, world_size: int, name: str, backend: str, timeout: timedelta
) -> tuple[int, Future[dist.ProcessGroup]]:
    """Listen on `host` for the group's other ranks. Returns the port to tell them, and the group to be.

    The store is made here from a listening socket: the port is taken when its number is told, only `host`
    is listened on, and under torchrun `tcp://` would mean the agent's store instead.

    Making the group waits for all ranks, and one that refuses never joins: so it waits in a thread, for at
    most MEETING_SECONDS. Then the future holds a RolloutError, and the ranks that did join are let go.

    Args:
        timeout: of the group's collectives, later.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=world_size)
    port = listener.getsockname()[1]
    meeting = min(timeout, timedelta(seconds=MEETING_SECONDS))

    def make() -> dist.ProcessGroup:
        store = dist.TCPStore(
            host, port, world_size, is_master=True, timeout=meeting, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        group, _ = c10d._new_process_group_helper(
            world_size, 0, [], dist.Backend(backend), dist.PrefixStore(name, store),
            group_name=name, timeout=meeting,
        )  # fmt: skip
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(timeout)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        return group

    def make_or_let_go() -> dist.ProcessGroup:
        try:
            return make()
        except Exception as error:
            problem = str(error)
            # The frames of the error hold the store, whose end is what the others are waiting for.
            traceback.clear_frames(error.__traceback__)
        raise RolloutError(f"not all servers joined the weight update: {problem}")

    return port, in_thread(make_or_let_go)
