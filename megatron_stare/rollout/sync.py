"""New weights to every server that answers.

    publisher = make_publisher(rollout, endpoints, "gloo", scratch_dir)
    left_out = publisher.publish(named_tensors, version=7)   # the others now serve version 7, and say so

Both ways, `disk` and `distributed`, share what this file says: servers that do not
answer are left out, generation is paused meanwhile, what was cached with the old
weights is dropped, the version is read back from every server.
"""

from __future__ import annotations

import abc
import concurrent.futures
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_stare.config.schema import RolloutSection
from megatron_stare.rollout.answer import as_version
from megatron_stare.rollout.endpoints import Endpoints, RolloutError
from megatron_stare.rollout.pulse import Pulse
from megatron_stare.rollout.threads import in_thread

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Bucket = list[tuple[str, torch.Tensor]]
CONTROL_TIMEOUT = 120.0  # seconds for calls that move no weights; a pause waits for running requests to end
_PROBE_SECONDS = 5.0
_RELEASE_SECONDS = 5.0
_FLUSH_SECONDS = 60.0
_POLL_SECONDS = 0.2


class PublishError(RolloutError):
    """No server has the new weights for certain; publish again, and those that are still there get them."""


class Publisher(abc.ABC):
    """Sends weights to the servers of `endpoints`. Lives on the trainer's global rank 0 only."""

    def __init__(self, rollout: RolloutSection, endpoints: Endpoints) -> None:
        self._rollout = rollout
        self._endpoints = endpoints
        self._found: dict[str, Any] = {}  # the servers that take part, and what each served before
        self._pulse = Pulse(endpoints, rollout.health_timeout)

    def publish(self, named_tensors: NamedTensors, version: int) -> list[str]:
        """Make every server that answers serve these weights as `version`; at least one takes them.

        While no server answers this waits, up to `rollout.outage_timeout`. The trainer's other ranks then
        wait in the first element's collective.

        Args:
            named_tensors: all weights, with Hugging Face's names and layouts, on CPU or GPU. Iterated once,
                in order and to its end even when a server fails on the way: for the trainer's other ranks
                each element is a collective.
            version: what responses will carry as their weight version.

        Returns:
            URLs of the servers that did not answer and so lack the weights.

        Raises:
            PublishError: no server answered, or one died or refused on the way. Servers may then hold a
                mixture, which calls itself incomplete; the same version may be published again at once.
        """
        remaining = iter(named_tensors)
        try:
            with Pulse(self._endpoints, self._rollout.health_timeout) as self._pulse:
                try:
                    self._send(remaining, version)
                    verifying = in_thread(self._verify, version)
                    self._each("/continue_generation", {})
                    self._wait([verifying])
                except BaseException:
                    self._release()
                    raise
        except Exception as error:
            for _ in remaining:
                pass
            if isinstance(error, PublishError):
                raise
            raise PublishError(f"weights {version} were not published: {error}") from error
        return [url for url in self._endpoints.servers if url not in self._found]

    def outdated(self, version: int) -> list[str]:
        """URLs of the servers that answer, and serve something else than `version`."""
        return [url for url, served in self._answering().items() if as_version(served) != version]

    @abc.abstractmethod
    def _send(self, named_tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Choose the servers, pause them, give all weights to them and set their version.

        Choosing takes a round trip, so it is left to the kinds of publisher to do something meanwhile.
        """

    @property
    def _targets(self) -> list[str]:
        return list(self._found)

    def _pause(self) -> None:
        """End what the servers generate now, and let nothing new begin."""
        self._each("/pause_generation", {"mode": "abort"})

    def _flush(self) -> None:
        """Drop what was cached with the old weights. Paused, a server may yet be busy with its last batch."""
        self._each(f"/flush_cache?timeout={_FLUSH_SECONDS:g}", {})

    def _set_version(self, version: str) -> None:
        self._each("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _release(self) -> None:
        """After a failure: let those that can generate do so. What they serve is known by its version."""
        calls = [
            in_thread(self._endpoints.call, url, "/continue_generation", {}, timeout=_RELEASE_SECONDS)
            for url in self._pulse.alive()
        ]
        concurrent.futures.wait(calls, timeout=_RELEASE_SECONDS)

    def close(self) -> None:  # noqa: B027
        """Let go of what is held on this side and on the servers. Idempotent."""

    def _verify(self, version: int) -> None:
        for url, info in self._each("/model_info", None).items():
            served = info.get("weight_version")
            if as_version(served) != version:
                raise PublishError(f"{url} serves weights {served!r} after {version} were published")

    def _choose(self) -> None:
        """Those that answer take part from here on; waits for the first."""
        limit = self._rollout.outage_timeout
        deadline = time.monotonic() + limit
        while not (found := self._answering()):
            if time.monotonic() > deadline:
                urls = ", ".join(self._endpoints.servers)
                raise PublishError(f"no server answered for rollout.outage_timeout={limit:g} s: {urls}")
            time.sleep(_POLL_SECONDS)
        self._found = found
        self._pulse.follow(list(found))

    def _answering(self) -> dict[str, Any]:
        """Weight version by URL, of the servers that answer soon."""
        calls = {
            url: in_thread(self._endpoints.require, url, "/model_info", timeout=_PROBE_SECONDS)
            for url in self._endpoints.servers
        }
        concurrent.futures.wait(calls.values(), timeout=_PROBE_SECONDS)
        return {
            url: call.result().get("weight_version")
            for url, call in calls.items()
            if call.done() and call.exception() is None
        }

    def _each(
        self, path: str, body: dict[str, Any] | None, *, timeout: float = CONTROL_TIMEOUT
    ) -> dict[str, Any]:
        """One call to every server that takes part, at the same time.

        Waits for all answers but those of servers that are lost; raises the first RolloutError.
        """
        calls = {
            url: in_thread(self._endpoints.require, url, path, body, timeout=timeout) for url in self._targets
        }
        waiting = set(calls.values())
        while waiting:
            waiting = concurrent.futures.wait(waiting, timeout=_POLL_SECONDS).not_done
            self._pulse.check()
        return {url: call.result() for url, call in calls.items()}

    def _wait(self, calls: Iterable[Future[Any]]) -> None:
        """Wait for all, or until one fails or a server is lost, and raise that."""
        waiting = set(calls)
        while waiting:
            done, waiting = concurrent.futures.wait(
                waiting, timeout=_POLL_SECONDS, return_when=concurrent.futures.FIRST_EXCEPTION
            )
            for call in done:
                call.result()
            self._pulse.check()


def buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], limit: int, first: int | None = None
) -> Iterator[Bucket]:
    """Consecutive tensors together, up to `limit` bytes; a larger tensor has a bucket of its own.

    The first bucket holds up to `first` bytes where that is given: a small one is soon on its way.
    """
    bucket: Bucket = []
    size, room = 0, limit if first is None else first
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > room:
            yield bucket
            bucket, size, room = [], 0, limit
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def make_publisher(
    rollout: RolloutSection,
    endpoints: Endpoints,
    device_backend: Literal["gloo", "nccl"],
    scratch_dir: str | Path,
    model_path: str | Path | None = None,
) -> Publisher:
    """The publisher that `rollout.sync` names.

    Args:
        device_backend: for `distributed`: gloo where trainer or servers are on CPU, else nccl.
        scratch_dir: for `disk`: a directory that every server can read; it holds one copy of the weights.
        model_path: for `disk`: config and tokenizer are copied from here, so that the copy is a whole model.
    """
    if rollout.sync == "disk":
        from megatron_stare.rollout.sync_disk import DiskPublisher

        source = None if model_path is None else Path(model_path)
        return DiskPublisher(rollout, endpoints, Path(scratch_dir), source)
    from megatron_stare.rollout.sync_distributed import DistributedPublisher

    return DistributedPublisher(rollout, endpoints, device_backend)
