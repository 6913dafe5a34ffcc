"""Whether servers are still there while something long is under way at them."""

from __future__ import annotations

import threading
import time

from megatron_stare.rollout.endpoints import Endpoints, RolloutError
from megatron_stare.rollout.threads import in_thread

_INTERVAL = 2.0


class Pulse:
    """Asks servers for their health, in the background, from `with` to its end.

    A machine that has died closes no connections: a call to it, or a broadcast, waits for as long as its own
    limit, which must be long. This finds out sooner.

    Args:
        limit: seconds without an answer after which a server counts as lost.
    """

    def __init__(self, endpoints: Endpoints, limit: float) -> None:
        self._endpoints = endpoints
        self._limit = limit
        self._heard: dict[str, float] = {}
        self._ended = threading.Event()

    def __enter__(self) -> Pulse:
        in_thread(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def follow(self, urls: list[str]) -> None:
        """Look after these servers, which have just answered."""
        self._heard = {url: time.monotonic() for url in urls}

    def alive(self) -> list[str]:
        """The servers that are not lost; all of them outside of `with`."""
        if self._ended.is_set():
            return list(self._heard)
        since = time.monotonic() - self._limit
        return [url for url, heard in self._heard.items() if heard > since]

    def check(self) -> None:
        """Raise RolloutError if a server is lost."""
        if len(alive := self.alive()) == len(self._heard):
            return
        lost = ", ".join(url for url in self._heard if url not in alive)
        raise RolloutError(f"{lost}: not healthy for rollout.health_timeout={self._limit:g} s")

    def _run(self) -> None:
        asking = {}
        while not self._ended.wait(min(_INTERVAL, self._limit / 3)):
            for url in list(self._heard):
                if url not in asking or asking[url].done():
                    asking[url] = in_thread(self._ask, url)

    def _ask(self, url: str) -> None:
        try:
            self._endpoints.call(url, "/health", timeout=self._limit)
        except OSError:
            return
        self._heard[url] = time.monotonic()
