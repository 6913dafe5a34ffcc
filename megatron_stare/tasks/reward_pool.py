"""Worker processes for rewards, with a time limit for each call.

Why not a library's pool: a reward must be limited one by one although it may
take microseconds, and a worker must start in a fraction of a second whatever
the trainer has imported. multiprocessing's spawn, and so pebble's ProcessPool,
imports the trainer's main module (torch and all) into every worker and limits
chunks as wholes; fork is unsafe beside the trainer's threads.

Each worker is a plain Python process with a socket of its own, so a crash
leaves nothing locked that others need. It is given chunks and answers call by
call: a worker that is late, or dead, is at the first unanswered call of its
chunk. It is killed and replaced, that call fails, the calls after it are given
out again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from megatron_stare.errors import UserError
from megatron_stare.tasks.lookup import describe
from megatron_stare.tasks.rewards import RewardCall

log = logging.getLogger(__name__)

_START_SECONDS = 120.0
"""Limit for a worker to import what its reward needs, on a busy machine."""
_MAX_CHUNK = 64
_TICK_SECONDS = 0.2
"""How often dead workers and a request to stop are looked for."""
_SOCKET_SECONDS = 10
"""Limit of one transfer between parent and worker, which only a stopped process reaches."""


@dataclass(slots=True)
class Outcome:
    """The result of one call: a reward, or why there is none."""

    reward: float = 0.0
    error: str | None = None
    timed_out: bool = False


class RewardPool:
    """Processes that compute rewards. All methods must be called by one thread, which outlives the workers.

    (The kernel kills a worker when the thread that started it ends; see reward_worker.py.)

    Args:
        reward: arguments of `make_reward`.
        workers: number of processes.
        timeout: seconds that one call may take; importing the reward's modules does not count.
        log_file: receives what rewards print; None: standard error.
    """

    def __init__(
        self, reward: dict[str, Any], workers: int, timeout: float, log_file: Path | None = None
    ) -> None:
        self._setup = {"path": [os.path.abspath(entry) for entry in sys.path], "reward": reward}
        self._timeout = timeout
        self._log: IO[bytes] | None = log_file.open("ab") if log_file else None
        self._failed_starts = 0
        self._last_failure = ""
        self._workers = [_Worker(self._setup, self._log) for _ in range(workers)]

    def wait_ready(self) -> None:
        """Wait until every worker has loaded the reward.

        Raises:
            UserError: one of them cannot.
        """
        while any(worker.starting for worker in self._workers):
            self._turn(_Batch([]))
            if self._failed_starts:
                self.close()
                raise UserError(self._last_failure)

    def run(
        self, calls: Sequence[RewardCall], should_stop: Callable[[], bool] = lambda: False
    ) -> list[Outcome]:
        """Outcomes of all calls, in their order.

        When `should_stop` turns true, calls not reached yet become errors, and only `close` may follow.
        """
        batch = _Batch(calls)
        self._failed_starts = 0
        while (batch.queue or any(worker.assigned for worker in self._workers)) and not should_stop():
            self._turn(batch)
            if self._failed_starts > 3 * len(self._workers):
                batch.give_up(f"no reward process could start: {self._last_failure}")
        batch.give_up("scoring was stopped")
        return batch.outcomes

    def close(self) -> None:
        """Kill all workers and what they started."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _turn(self, batch: _Batch) -> None:
        """Give out work, wait for something to happen, and deal with it."""
        for worker in self._workers:
            if batch.queue and worker.idle:
                # Several chunks for each worker, so that slow calls spread; ever smaller ones to the end.
                size = max(1, min(_MAX_CHUNK, len(batch.queue) // (4 * len(self._workers))))
                worker.give(batch, size, self._timeout)
        now = time.monotonic()
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        patience = min([*deadlines, now + _TICK_SECONDS]) - now
        wait([worker.connection for worker in self._workers], max(0.0, patience))
        for place, worker in enumerate(self._workers):
            # The time is taken before listening: an answer that came in time counts however late it is read.
            now = time.monotonic()
            alive = worker.listen(batch, self._timeout)
            if worker.loaded_now:
                self._failed_starts = 0
                worker.loaded_now = False
            # What the reward started may hold the socket open, so the process is looked at as well.
            if not alive or worker.ended():
                worker.listen(batch, self._timeout)  # the last answers before its end
                self._replace(place, f"the reward process died ({worker.exit_reason()})", False, batch)
            elif worker.deadline is not None and now > worker.deadline:
                self._replace(place, f"no reward within {self._timeout:g} s", True, batch)

    def _replace(self, place: int, reason: str, timed_out: bool, batch: _Batch) -> None:
        worker = self._workers[place]
        worker.kill()
        if worker.starting:
            self._failed_starts += 1
            late = f"the reward was not loaded within {_START_SECONDS:g} s"
            self._last_failure = worker.failure or (late if timed_out else reason)
        elif worker.assigned:
            culprit = worker.assigned.popleft()
            batch.outcomes[culprit] = Outcome(error=reason, timed_out=timed_out)
            batch.queue.extendleft(reversed(worker.assigned))
        self._workers[place] = _Worker(self._setup, self._log)


class _Batch:
    """Calls to be scored: which are still to be given out, and the outcomes so far."""

    def __init__(self, calls: Sequence[RewardCall]) -> None:
        self._calls = calls
        self.queue = deque(range(len(calls)))
        self.outcomes: list[Outcome | None] = [None] * len(calls)

    def take(self, size: int) -> tuple[list[int], bytes]:
        """The next calls, also pickled. Calls that cannot be pickled fail and are left out."""
        chunk = [self.queue.popleft() for _ in range(size)]
        try:
            return chunk, pickle.dumps([self._calls[index] for index in chunk])
        except Exception:
            good = [index for index in chunk if self._can_be_sent(index)]
            return good, pickle.dumps([self._calls[index] for index in good])

    def put_back(self, chunk: list[int]) -> None:
        self.queue.extendleft(reversed(chunk))

    def give_up(self, reason: str) -> None:
        """End every call that has no outcome."""
        self.queue.clear()
        for index, outcome in enumerate(self.outcomes):
            if outcome is None:
                self.outcomes[index] = Outcome(error=reason)

    def _can_be_sent(self, index: int) -> bool:
        try:
            pickle.dumps(self._calls[index])
        except Exception as error:
            reason = f"the row cannot be sent to a reward process: {describe(error)}"
            self.outcomes[index] = Outcome(error=reason)
            return False
        return True


class _Worker:
    """One process: its socket, the calls it was given and has not answered, and until when it has to."""

    def __init__(self, setup: dict[str, Any], log_file: IO[bytes] | None) -> None:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _SOCKET_SECONDS, 0))
        output = 2 if log_file is None else log_file
        script = Path(__file__).with_name("reward_worker.py")
        self._process = subprocess.Popen(
            # -P: the script's directory must not be searched, its modules would hide others of their name.
            [sys.executable, "-P", str(script), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A group of its own: Ctrl-C is the trainer's business, and what a reward starts dies with it.
            process_group=0,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.assigned: deque[int] = deque()
        self.starting = True
        self.loaded_now = False
        self.failure: str | None = None
        self.deadline: float | None = time.monotonic() + _START_SECONDS
        with contextlib.suppress(OSError):  # it died at once, which is found when it is looked at
            self.connection.send(setup)

    @property
    def idle(self) -> bool:
        return not (self.starting or self.assigned)

    def give(self, batch: _Batch, size: int, timeout: float) -> None:
        chunk, payload = batch.take(size)
        if not chunk:
            return
        try:
            self.connection.send((len(chunk), payload))
        except OSError:  # it died while it had nothing to do: that is found next, and fails nobody's reward
            batch.put_back(chunk)
            return
        self.assigned.extend(chunk)
        self.deadline = time.monotonic() + timeout

    def listen(self, batch: _Batch, timeout: float) -> bool:
        """Take every message that has arrived. False if the worker can send no more."""
        try:
            while self.connection.poll():
                result, error = self.connection.recv()
                if self.starting:
                    self.deadline = None
                    if result == "failed":
                        self.failure = error
                        return False
                    self.starting, self.loaded_now = False, True
                    continue
                reward = 0.0 if error is not None else result
                batch.outcomes[self.assigned.popleft()] = Outcome(reward, error)
                self.deadline = time.monotonic() + timeout if self.assigned else None
        except (EOFError, OSError, pickle.UnpicklingError):
            return False
        return True

    def ended(self) -> bool:
        """Whether the process has ended. It is not reaped here, so that its group's number stays its own."""
        return self._end() is not None

    def exit_reason(self) -> str:
        """How the process ended; it is given a moment to do so."""
        for _ in range(50):
            if (end := self._end()) is not None:
                if end.si_code == os.CLD_EXITED:
                    return f"exit code {end.si_status}"
                return f"signal {signal.Signals(end.si_status).name}"
            time.sleep(0.01)
        return "it closed its connection"

    def kill(self) -> None:
        """Kill the process and its group, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.connection.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            log.error("reward process %d does not die (stuck in the kernel?)", self._process.pid)

    def _end(self) -> Any:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
