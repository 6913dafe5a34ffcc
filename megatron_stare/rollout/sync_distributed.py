"""Weights by torch.distributed broadcast, in flattened buckets, to all servers at once."""

from __future__ import annotations

import concurrent.futures
import functools
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_stare.config.schema import RolloutSection
from megatron_stare.rollout.endpoints import Endpoints, RolloutError
from megatron_stare.rollout.sync import CONTROL_TIMEOUT, Bucket, Publisher, PublishError, buckets

_POLL_SECONDS = 0.001


class DistributedPublisher(Publisher):
    """Broadcasts from rank 0 of a group of its own: this process, then every server's tp ranks in turn.

    The group is made at the first publish, and anew after any failure, so that servers or a trainer that
    were restarted in between find each other again.
    """

    def __init__(
        self, rollout: RolloutSection, endpoints: Endpoints, backend: Literal["gloo", "nccl"]
    ) -> None:
        super().__init__(rollout, endpoints)
        self._backend = backend
        self._buffers = _Buffers()
        self._name = ""
        self._group: dist.ProcessGroup | None = None
        self._sessions = True  # whether the servers know begin_weight_update (SGLang 0.5.9 does not)

    def _send(self, named_tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        limit = self._rollout.bucket_mb << 20
        under_way: list[_Sending] = []
        try:
            beginning = self._pool.submit(self._begin, version)
            for bucket in buckets(named_tensors, limit, first=limit // 8):
                flat = self._buffers.flatten(bucket)  # while the servers are told, or load the last one
                beginning.result()
                # The next request may wait at the server while it loads, but only behind the last one: so
                # it is sent when that one's bytes have arrived.
                for sending in under_way:
                    sending.wait_until_sent()
                under_way.append(self._broadcast(*flat))
                if len(under_way) > 1:
                    under_way.pop(0).wait()
            beginning.result()
            for sending in under_way:
                sending.wait()
            if self._sessions:
                self._each("/end_weight_update", {}, timeout=self._rollout.request_timeout)
        except BaseException:
            for sending in under_way:
                sending.abandon()
            self._disconnect()
            raise
        self._set_version(str(version))

    def _set_version(self, version: str) -> None:
        self._each("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _begin(self, version: int) -> None:
        # Until the end of the update a server holds a mixture, which must pass for neither version.
        marking = self._pool.submit(self._set_version, f"incomplete-{version}")
        self._pause()
        flushing = self._pool.submit(self._each, "/flush_cache", {})  # nothing new is cached from here on
        if self._group is None:
            self._connect()
        for beginning in [self._pool.submit(self._begin_session, url) for url in self._endpoints.servers]:
            beginning.result()
        for call in (marking, flushing):
            call.result()

    def _begin_session(self, url: str) -> None:
        path = "/begin_weight_update"
        try:
            status, answer = self._endpoints.call(url, path, {}, timeout=CONTROL_TIMEOUT)
        except OSError as error:
            raise RolloutError(f"{url}{path}: no answer ({error})") from error
        if status == 404:
            self._sessions = False
        elif status == 400 and "already open" in str(answer):  # left by a publish that failed
            return
        elif status != 200:
            raise RolloutError(f"{url}{path}: {status} {str(answer)[:500]}")

    def _broadcast(
        self, flat: torch.Tensor, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> _Sending:
        assert self._group is not None
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # once, at the end
        }
        limit = self._rollout.request_timeout
        answers = {
            url: self._pool.submit(
                self._endpoints.require, url, "/update_weights_from_distributed", body, timeout=limit
            )
            for url in self._endpoints.servers
        }
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        return _Sending(flat, work, answers, time.monotonic() + limit)

    def _connect(self) -> None:
        """Make the group. The servers' side is SGLang's init_custom_process_group.

        The store is made here from a listening socket: the port is taken when its number is told, only the
        servers' address is listened on, and under torchrun `tcp://` would mean the agent's store instead.
        """
        servers, tp = self._endpoints.servers, self._rollout.tp
        world_size = 1 + tp * len(servers)
        host = self._rollout.host
        self._name = f"megatron_stare-{uuid.uuid4().hex[:12]}"
        limit = timedelta(seconds=min(self._rollout.request_timeout, 1800.0))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=world_size)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host, port, world_size, is_master=True, timeout=limit, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip

        def body(index: int) -> dict[str, Any]:
            return {
                "master_address": host,
                "master_port": port,
                "rank_offset": 1 + index * tp,
                "world_size": world_size,
                "group_name": self._name,
                "backend": self._backend,
            }

        answers = {
            url: self._pool.submit(
                self._endpoints.require,
                url,
                "/init_weights_update_group",
                body(index),
                timeout=limit.total_seconds(),
            )
            for index, url in enumerate(servers)
        }
        # Making the group waits for all, and a server that refuses never joins: so it waits in a thread,
        # which is left behind if a server refuses.
        making = _in_thread(
            lambda: c10d._new_process_group_helper(
                world_size, 0, [], dist.Backend(self._backend), dist.PrefixStore(self._name, store),
                group_name=self._name, timeout=limit,
            )[0]
        )  # fmt: skip
        try:
            for future in concurrent.futures.as_completed([*answers.values(), making], limit.total_seconds()):
                future.result()
        except BaseException:
            making.add_done_callback(lambda made: made.exception() or _close_group([made.result()]))
            raise
        self._group = making.result()
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}

    def _disconnect(self) -> None:
        """Forget the group on both sides.

        A broadcast that hangs here fails when the servers let go, and one that hangs in a server when this
        side's connections close. So both are told, and neither is waited for longer than some seconds.
        """
        holder, self._group = [self._group], None
        name, self._name = self._name, ""
        if not name:
            return
        path, body = "/destroy_weights_update_group", {"group_name": name}
        telling = [
            _in_thread(functools.partial(self._endpoints.call, url, path, body, timeout=10.0))
            for url in self._endpoints.servers
        ]
        concurrent.futures.wait(telling, timeout=1.0)
        concurrent.futures.wait([*telling, _in_thread(lambda: _close_group(holder))], timeout=10.0)

    def close(self) -> None:
        self._disconnect()
        super().close()


class _Sending:
    """One bucket on its way, watched from both ends.

    A server that rejects an update answers without joining the broadcast, which then would wait for it
    for ever. So neither the broadcast nor the answers are waited for alone.
    """

    def __init__(
        self, flat: torch.Tensor, work: Any, answers: dict[str, Future[Any]], deadline: float
    ) -> None:
        self._flat: torch.Tensor | None = flat  # kept until it is sent
        self._work = work
        self._answers = answers
        self._deadline = deadline

    def abandon(self) -> None:
        """Let go of the broadcast, which holds the group's connections open."""
        self._work = self._flat = None

    def wait_until_sent(self) -> None:
        """Return when every server has the bytes. Raises PublishError or RolloutError."""
        self._wait(for_answers=False)

    def wait(self) -> None:
        """Return when every server has loaded the bucket. Raises PublishError or RolloutError."""
        self._wait(for_answers=True)

    def _wait(self, for_answers: bool) -> None:
        while True:
            open_answers = [url for url, future in self._answers.items() if not future.done()]
            for url in self._answers.keys() - open_answers:
                self._answers[url].result()
            if self._work.is_completed():
                self._raise_failure()
                if not (open_answers and for_answers):
                    return
            if time.monotonic() > self._deadline:
                waiting = ", ".join(open_answers) or "the broadcast"
                limit = "rollout.request_timeout"
                raise PublishError(f"a weight update did not end within {limit}: waited for {waiting}")
            # An answer wakes this at once; the broadcast cannot.
            waited = [self._answers[url] for url in open_answers]
            if waited:
                concurrent.futures.wait(waited, _POLL_SECONDS, concurrent.futures.FIRST_COMPLETED)
            else:
                time.sleep(_POLL_SECONDS)

    def _raise_failure(self) -> None:
        """Raise what went wrong with the broadcast: a server's own words, where it has any."""
        try:
            self._work.wait()
        except RuntimeError as error:
            done, _ = concurrent.futures.wait(self._answers.values(), timeout=1.0)
            for answer in done:
                answer.result()
            raise PublishError(
                f"the broadcast of weights broke off, so a server has died or was cut off: {error}"
            ) from error


class _Buffers:
    """Two flat buffers, filled in turn: one is on its way while the next is filled.

    They are kept from one publish to the next. Fresh memory for each bucket would cost more than the copying,
    because the system clears it page by page.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor | None] = [None, None]

    def flatten(self, bucket: Bucket) -> tuple[torch.Tensor, list[str], list[str], list[list[int]]]:
        """All of a bucket as bytes, with names, dtypes and shapes; valid until the call after the next.

        Wide dtypes first: then each tensor starts at a multiple of its element size, which SGLang demands.
        """
        ordered = sorted(bucket, key=lambda item: -item[1].element_size())
        flat = self._take(sum(tensor.nbytes for _, tensor in ordered), ordered[0][1].device)
        start = 0
        for _, tensor in ordered:
            flat[start : start + tensor.nbytes].copy_(tensor.detach().reshape(-1).view(torch.uint8))
            start += tensor.nbytes
        names = [name for name, _ in ordered]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered]
        shapes = [list(tensor.shape) for _, tensor in ordered]
        return flat, names, dtypes, shapes

    def _take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        buffer = self._buffers.pop(0)
        if buffer is None or buffer.numel() < nbytes or buffer.device != device:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._buffers.append(buffer)
        return buffer[:nbytes]


def _close_group(holder: list[dist.ProcessGroup | None]) -> None:
    """Close the connections of the group in `holder`.

    Gloo closes them only when nothing refers to the group any more; abort() and destroy_process_group() do
    not suffice. So the last reference must be the holder's, and is dropped here.
    """
    group = holder.pop()
    if group is not None:
        group.abort()  # for NCCL; without effect on gloo
        dist.destroy_process_group(group)


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call it in a daemon thread, which may hang without keeping this process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
