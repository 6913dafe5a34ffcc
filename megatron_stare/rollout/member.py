"""A process of the fleet that is started again when it dies or hangs, without ever keeping anyone waiting."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_stare.rollout.endpoints import RolloutError
from megatron_stare.rollout.process import Child, end
from megatron_stare.rollout.threads import in_thread

_STARTING_INTERVAL = 0.3
_UP_INTERVAL = 1.0
# A server whose worker process has died says so, but goes on running.
_REFUSING_SECONDS = 5.0
_LONGEST_PAUSE = 30.0
_GROUP_SECONDS = 5.0
OnProblem = Callable[[str, str], None]


@dataclass(frozen=True)
class Program:
    """What a member runs, and how others see that it works.

    Attributes:
        is_healthy: asks it for its health; False: it says that it is not. Raises OSError where it does not
            answer.
        warm_up: called once after it was first healthy; raises OSError or RolloutError. Up means after this.
    """

    name: str
    module: str
    arguments: list[str]
    environment: dict[str, str]
    log: Path
    is_healthy: Callable[[], bool]
    warm_up: Callable[[], None]


@dataclass(frozen=True)
class Limits:
    """When a member counts as failed, and how often it may."""

    start_timeout: float
    health_timeout: float
    restarts: int


class Member:
    """One process after the other of a Program. start() and watch() belong to the fleet's main thread."""

    def __init__(self, program: Program, limits: Limits, on_problem: OnProblem) -> None:
        self._program, self._limits, self._on_problem = program, limits, on_problem
        self._restarts = 0
        self._early = 0  # times in a row that it ended before it was up
        self._ending: Future[None] | None = None
        self._not_before = 0.0
        self.start()

    def start(self) -> None:
        """Start a process. It is killed when the calling thread ends (see Child)."""
        program = self._program
        self.child = Child(program.name, program.module, program.arguments, program.environment, program.log)
        self._monitor = _Monitor(program.is_healthy, program.warm_up)

    @property
    def name(self) -> str:
        """The name of its log."""
        return self._program.name

    @property
    def is_up(self) -> bool:
        """Whether it was healthy and warmed up since it was last started."""
        return self._monitor.up and self._ending is None

    def failure(self) -> str | None:
        """What is wrong with it, for a person; None while it loads or is well."""
        if reason := self.child.exit_reason():
            return reason
        now, monitor, limits = time.monotonic(), self._monitor, self._limits
        if not monitor.up:
            if now - monitor.begun > limits.start_timeout:
                return f"was not ready after rollout.start_timeout={limits.start_timeout:g} s{monitor.said}"
        elif monitor.refuses_since and now - monitor.refuses_since > _REFUSING_SECONDS:
            return f"said for {_REFUSING_SECONDS:g} s that it is not healthy"
        elif now - monitor.heard > limits.health_timeout:
            return f"was not healthy for rollout.health_timeout={limits.health_timeout:g} s{monitor.said}"
        return None

    def error(self, problem: str, who: str | None = None) -> RolloutError:
        """An error that names the member, or `who`, and quotes the member's log."""
        child = self.child
        return RolloutError(f"{who or self.name} {problem}; the end of {child.log}:\n{child.log_tail()}")

    def watch(self) -> None:
        """Take the next step of a restart, where one is needed; returns at once.

        Raises RolloutError when it has been restarted too often.
        """
        if self._ending is not None:
            if self._ending.done() and time.monotonic() > self._not_before:
                self._ending = None
                self.start()
            return
        problem = self.failure()
        if problem is None:
            return
        allowed = self._limits.restarts
        if self._restarts >= allowed:
            raise self.error(f"{problem}, after rollout.server_restarts={allowed} restarts")
        self._restarts += 1
        self._early = 0 if self._monitor.up else self._early + 1
        # One that ends at once may need something that comes back, such as a full disk's space.
        pause = min(_LONGEST_PAUSE, 2.0**self._early) if self._early else 0.0
        self._not_before = time.monotonic() + pause
        message = f"{problem}; starting it again ({self._restarts} of at most {allowed} times)"
        self._note(message)
        self._on_problem(self.name, message)
        self._monitor.stop()
        self._ending = in_thread(_end_group, self.child)

    def stop(self) -> None:
        """No longer ask it for its health; end(member.child) is the caller's."""
        self._monitor.stop()

    def _note(self, message: str) -> None:
        with contextlib.suppress(OSError), self._program.log.open("a", encoding="utf-8") as log:
            log.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] megatron_stare: {self.name} {message}\n")


class _Monitor:
    """Asks one process for its health, in a thread of its own."""

    def __init__(self, is_healthy: Callable[[], bool], warm_up: Callable[[], None]) -> None:
        self._is_healthy, self._warm_up = is_healthy, warm_up
        self.begun = self.heard = time.monotonic()
        self.up = False
        self.refuses_since: float | None = None
        self._last = ""
        self._stopped = threading.Event()
        in_thread(self._run)

    @property
    def said(self) -> str:
        """The last failure in brackets, if there was one."""
        return f" ({self._last})" if self._last else ""

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_UP_INTERVAL if self.up else _STARTING_INTERVAL):
            try:
                if not self._is_healthy():
                    self.refuses_since = self.refuses_since or time.monotonic()
                    continue
                self.refuses_since = None
                if not self.up:
                    self._warm_up()
                    self.up = True
                self.heard, self._last = time.monotonic(), ""
            except (OSError, RolloutError) as error:
                self._last = str(error)


def _end_group(child: Child) -> None:
    """End a child and all it started, and wait until their ports and memory are free again."""
    end([child], grace=0.0)
    deadline = time.monotonic() + _GROUP_SECONDS
    while time.monotonic() < deadline and any(_is_in_group(p, child.pid) for p in psutil.process_iter()):
        time.sleep(0.05)


def _is_in_group(process: Any, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
