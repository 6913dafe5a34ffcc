"""New weights to every server, all of them or an error.

    publisher = make_publisher(rollout, endpoints, "gloo", scratch_dir)
    publisher.publish(named_tensors, version=7)   # now every server serves version 7, and says so

Both ways, `disk` and `distributed`, share what this file says: generation is
paused meanwhile, what was cached with the old weights is dropped, the version is
read back from every server.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_stare.config.schema import RolloutSection
from megatron_stare.rollout.answer import as_version
from megatron_stare.rollout.endpoints import Endpoints, RolloutError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Bucket = list[tuple[str, torch.Tensor]]
CONTROL_TIMEOUT = 120.0  # seconds for calls that move no weights; a pause waits for running requests to end


class PublishError(RolloutError):
    """Some server lacks the new weights. None may be sampled from until a publish succeeds."""


class Publisher(abc.ABC):
    """Sends weights to all servers of `endpoints`. Lives on the trainer's global rank 0 only."""

    def __init__(self, rollout: RolloutSection, endpoints: Endpoints) -> None:
        self._rollout = rollout
        self._endpoints = endpoints
        # Three a server: updates that hang, two at most, must not keep their cleaning up from being sent.
        # Three to lead them.
        self._pool = ThreadPoolExecutor(3 * len(endpoints.servers) + 3, thread_name_prefix="publish")

    def publish(self, named_tensors: NamedTensors, version: int) -> None:
        """Make every server serve these weights as `version`.

        Args:
            named_tensors: all weights, with Hugging Face's names and layouts, on CPU or GPU. Iterated once,
                in order and to its end even when a server fails on the way: for the trainer's other ranks
                each element is a collective.
            version: what responses will carry as their weight version.

        Raises:
            PublishError: names the server and quotes its answer.
        """
        remaining = iter(named_tensors)
        try:
            try:
                self._send(remaining, version)
                verifying = self._pool.submit(self._verify, version)
            finally:
                self._each("/continue_generation", {})
            verifying.result()
        except Exception as error:
            for _ in remaining:
                pass
            if isinstance(error, PublishError):
                raise
            raise PublishError(f"weights {version} were not published: {error}") from error

    @abc.abstractmethod
    def _send(self, named_tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Pause the servers, have them drop their cache, give all weights to them and set their version."""

    def _pause(self) -> None:
        """End what the servers generate now, and let nothing new begin."""
        self._each("/pause_generation", {"mode": "abort"})

    def close(self) -> None:
        """Let go of what is held on this side and on the servers. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _verify(self, version: int) -> None:
        for url, info in self._each("/model_info", None).items():
            served = info.get("weight_version")
            if as_version(served) != version:
                raise PublishError(f"{url} serves weights {served!r} after {version} were published")

    def _each(
        self, path: str, body: dict[str, Any] | None, *, timeout: float = CONTROL_TIMEOUT
    ) -> dict[str, Any]:
        """One call to every server at the same time. Waits for all answers; raises the first RolloutError."""
        calls = {
            url: self._pool.submit(self._endpoints.require, url, path, body, timeout=timeout)
            for url in self._endpoints.servers
        }
        results, errors = {}, []
        for url, future in calls.items():
            try:
                results[url] = future.result()
            except RolloutError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results


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
