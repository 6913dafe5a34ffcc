"""Which server to ask next: in turn those that answer and serve the wanted weights."""

from __future__ import annotations

import asyncio
import enum
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from megatron_stare.rollout.answer import as_version
from megatron_stare.rollout.endpoints import RolloutError
from megatron_stare.tasks.sample import Group

PROBE_SECONDS = 2.0  # how long a probe waits for an answer
_ROUND_SECONDS = 0.25  # between probes while someone is missing
_CALM_SECONDS = 5.0  # between probes while all is well
_LATE_SECONDS = 10.0  # a server that is late for longer counts as away: before, it may only be busy
_LONGEST_REST = 10.0


class StaleServersError(RolloutError):
    """Servers answer, but none of them serves the weights asked for: only a publish can help.

    Attributes:
        groups: one item a prompt, in order: what was finished before, else None.
    """

    groups: list[Group | None]


class NoAnswer(Exception):
    """A request or a probe got no answer, or one that may be better elsewhere."""


class Late(NoAnswer):
    """There was none in time."""


class _State(enum.Enum):
    UNKNOWN = enum.auto()
    CURRENT = enum.auto()
    STALE = enum.auto()
    LATE = enum.auto()
    AWAY = enum.auto()


@dataclass
class _Peer:
    """A server, or the router, as it was seen last."""

    url: str
    state: _State = _State.UNKNOWN
    heard: float = field(default_factory=time.monotonic)
    failures: int = 0  # requests, in a row
    rests_until: float = 0.0
    note: str = "not asked yet"
    lost: bool = False

    @property
    def usable(self) -> bool:
        return self.state is _State.CURRENT and not self.rests_until


class Rotation:
    """Hands out URLs for one generate call and learns from what became of the requests.

    watch() must run beside the requests: it probes, and it is what ends an outage, or the call. The router
    is handed out only while every server is current, because it knows nothing of weights.

    Args:
        probe: asks a server for the version it serves, and the router whether it is there.
            Raises NoAnswer.
        let_go: breaks off all requests to a URL: its machine has died without closing its connections.
        turn: which server is the first.
    """

    def __init__(
        self,
        servers: list[str],
        router: str | None,
        *,
        version: int | None,
        outage_timeout: float,
        health_timeout: float,
        probe: Callable[[str], Awaitable[str | None]],
        let_go: Callable[[str], Awaitable[None]],
        turn: int = 0,
    ) -> None:
        self._servers = [_Peer(url) for url in servers]
        self._router = _Peer(router) if router else None
        self._peers = {peer.url: peer for peer in [*self._servers, *([self._router] if router else [])]}
        self._turns: Iterator[int] = itertools.count(turn)
        self._version = version
        self._outage_timeout = outage_timeout
        # Where the fleet watches the server, it has restarted it by then.
        self._lost_after = 2 * health_timeout
        self._probe = probe
        self._let_go = let_go
        self._none_since: float | None = None  # no server answers
        self._failing_since: float | None = None  # requests fail, and none has succeeded
        self._usable = asyncio.Event()
        self._alarm = asyncio.Event()

    async def take(self, *, direct: bool = False) -> str:
        """The URL for the next request; waits while there is none. `direct`: never the router's."""
        while True:
            usable = [peer.url for peer in self._servers if peer.usable]
            everyone = len(usable) == len(self._servers)
            if self._router and self._router.usable and everyone and not direct:
                return self._router.url
            if usable:
                return usable[next(self._turns) % len(usable)]
            self._usable.clear()
            await self._usable.wait()

    def good(self, url: str) -> None:
        """A request to `url` got an answer that training can use."""
        peer = self._peers[url]
        peer.failures, peer.heard, peer.lost = 0, time.monotonic(), False
        self._none_since = self._failing_since = None

    def failed(self, url: str, begun: float, problem: Exception, *, stale: bool = False) -> None:
        """A request to `url`, sent at `begun`, got no good answer. The peer is probed before it gets another.

        Raises RolloutError when requests have failed for `outage_timeout` and none has succeeded.
        """
        now = time.monotonic()
        peer = self._peers[url]
        peer.note = str(problem)
        if peer is not self._router and not peer.rests_until:
            # Those that were under way together fail together: one failure.
            peer.failures += 1
            peer.rests_until = now + min(_LONGEST_REST, _ROUND_SECONDS * 2**peer.failures)
        if stale and peer is not self._router:
            peer.state = _State.STALE
        elif peer.state is _State.CURRENT:
            peer.state = _State.UNKNOWN
        self._alarm.set()
        # A long response that was broken off at its end says nothing about the time before.
        worked = now - begun > self._outage_timeout and not isinstance(problem, Late)
        if self._failing_since is None or worked:
            self._failing_since = now
        elif now - self._failing_since > self._outage_timeout:
            raise RolloutError(
                f"no request was answered for rollout.outage_timeout={self._outage_timeout:g} s, although "
                f"servers say that they are up; the last: {problem}; {_LOGS}"
            )

    async def watch(self) -> None:
        """Probe for ever. Raises StaleServersError, or RolloutError when no server has answered for
        `outage_timeout`."""
        while True:
            self._alarm.clear()
            await asyncio.gather(*(self._look(peer) for peer in self._peers.values()))
            self._judge()
            well = all(peer.usable for peer in self._peers.values())
            if well:
                try:
                    await asyncio.wait_for(self._alarm.wait(), _CALM_SECONDS)
                except TimeoutError:
                    continue
            else:
                await asyncio.sleep(_ROUND_SECONDS)

    async def _look(self, peer: _Peer) -> None:
        begun = time.monotonic()
        try:
            served = await self._probe(peer.url)
        except NoAnswer as problem:
            now = time.monotonic()
            peer.note = str(problem)
            late = isinstance(problem, Late) and now - peer.heard < _LATE_SECONDS
            peer.state = _State.LATE if late else _State.AWAY
            if now - peer.heard > self._lost_after and not peer.lost:
                peer.lost = True
                await self._let_go(peer.url)
                if self._router:  # it may have passed requests on to the lost one
                    await self._let_go(self._router.url)
            return
        peer.heard, peer.lost = time.monotonic(), False
        wanted = self._version is None or peer is self._router or as_version(served) == self._version
        peer.state = _State.CURRENT if wanted else _State.STALE
        if not wanted:
            peer.note = f"serves weights {served}"
        if peer.rests_until < begun:
            peer.rests_until = 0.0
        if peer.usable and peer is not self._router:
            self._usable.set()

    def _judge(self) -> None:
        states = {peer.state for peer in self._servers}
        if states & {_State.CURRENT, _State.STALE}:
            self._none_since = None
        if _State.STALE in states and states <= {_State.STALE, _State.AWAY}:
            raise StaleServersError(
                f"no server that answers serves weights {self._version} ({self._notes()}): they missed an "
                "update or were restarted; publish the weights again"
            )
        if not states <= {_State.AWAY}:
            return
        now = time.monotonic()
        if self._none_since is None:
            self._none_since = now
        elif now - self._none_since > self._outage_timeout:
            raise RolloutError(
                f"no server answered for rollout.outage_timeout={self._outage_timeout:g} s "
                f"({self._notes()}); {_LOGS}"
            )

    def _notes(self) -> str:
        notes = [f"{peer.url} {peer.note}" for peer in self._servers]
        return "; ".join(notes[:4]) + (f"; and {len(notes) - 4} more" if len(notes) > 4 else "")


_LOGS = "the logs of the servers and the router are in the run's logs directory"
