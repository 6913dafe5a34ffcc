"""Weights by torch.distributed broadcast, in flattened buckets, to all servers at once."""

from __future__ import annotations

import concurrent.futures
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_stare.config.schema import RolloutSection
from megatron_stare.rollout.answer import as_version
from megatron_stare.rollout.endpoints import Endpoints, RolloutError
from megatron_stare.rollout.meeting import MEETING_SECONDS, meet
from megatron_stare.rollout.sync import CONTROL_TIMEOUT, Bucket, Publisher, PublishError, buckets
from megatron_stare.rollout.threads import in_thread

_POLL_SECONDS = 0.001
_PARTING_SECONDS = 5.0


class DistributedPublisher(Publisher):
    """Broadcasts from rank 0 of a group of its own: this process, then the servers' tp ranks in turn.

    The group is made at the first publish, and anew after any failure and whenever the servers that answer
    are others than last time, one that was restarted included.
    """

    def __init__(
        self, rollout: RolloutSection, endpoints: Endpoints, backend: Literal["gloo", "nccl"]
    ) -> None:
        super().__init__(rollout, endpoints)
        self._backend = backend
        self._buffers = _Buffers()
        self._name = ""
        self._group: dist.ProcessGroup | None = None
        self._members: list[str] = []  # the group's servers
        self._last: int | None = None  # what all of them serve since the last publish
        self._sessions = True  # whether the servers know begin_weight_update (SGLang 0.5.9 does not)

    def _send(self, named_tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        limit = self._rollout.bucket_mb << 20
        under_way: list[_Sending] = []
        try:
            beginning = in_thread(self._begin, version)
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
        self._last = version

    def _begin(self, version: int) -> None:
        self._choose()
        # Until the end of the update a server holds a mixture, which must pass for neither version.
        marking = in_thread(self._set_version, f"incomplete-{version}")
        self._pause()
        flushing = in_thread(self._flush)  # nothing new is cached from here on
        if self._group is not None and not self._group_is_current():
            self._disconnect()
        if self._group is None:
            self._connect()
        self._wait([*(in_thread(self._begin_session, url) for url in self._targets), marking, flushing])

    def _group_is_current(self) -> bool:
        """Whether the servers are those of the group: a restarted one serves what it started with."""
        served = {as_version(version) for version in self._found.values()}
        return self._members == self._targets and served == {self._last}

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
            url: in_thread(
                self._endpoints.require, url, "/update_weights_from_distributed", body, timeout=limit
            )
            for url in self._members
        }
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        return _Sending(flat, work, answers, time.monotonic() + limit, self._pulse.check)

    def _connect(self) -> None:
        """Make the group. The servers' side is SGLang's init_custom_process_group."""
        self._members, tp = self._targets, self._rollout.tp
        world_size = 1 + tp * len(self._members)
        host = self._endpoints.rendezvous or self._rollout.host
        self._name = f"megatron_stare-{uuid.uuid4().hex[:12]}"
        limit = min(self._rollout.request_timeout, 1800.0)
        port, making = meet(host, world_size, self._name, self._backend, timedelta(seconds=limit))

        def body(index: int) -> dict[str, Any]:
            return {
                "master_address": host,
                "master_port": port,
                "rank_offset": 1 + index * tp,
                "world_size": world_size,
                "group_name": self._name,
                "backend": self._backend,
            }

        answers = [
            in_thread(self._endpoints.require, url, "/init_weights_update_group", body(index), timeout=limit)
            for index, url in enumerate(self._members)
        ]
        try:
            self._wait([*answers, making])
        except BaseException:
            # Until then those that have joined wait for the others, and hear nothing else.
            concurrent.futures.wait([making], timeout=2 * MEETING_SECONDS)
            making.add_done_callback(lambda made: made.exception() or _close_group([made.result()]))
            raise
        self._group = making.result()

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
        telling = {
            url: in_thread(self._endpoints.call, url, path, body, timeout=2 * _PARTING_SECONDS)
            for url in self._members
        }
        concurrent.futures.wait(telling.values(), timeout=1.0)
        alive = [telling[url] for url in self._pulse.alive() if url in telling]
        concurrent.futures.wait([*alive, in_thread(_close_group, holder)], timeout=_PARTING_SECONDS)

    def close(self) -> None:
        self._disconnect()
        super().close()


class _Sending:
    """One bucket on its way, watched from both ends.

    A server that rejects an update answers without joining the broadcast, which then would wait for it
    for ever. So neither the broadcast nor the answers are waited for alone.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        work: Any,
        answers: dict[str, Future[Any]],
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        self._flat: torch.Tensor | None = flat  # kept until it is sent
        self._work = work
        self._answers = answers
        self._deadline = deadline
        self._check = check  # raises when a server is lost

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
            self._check()
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
