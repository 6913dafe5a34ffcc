"""The process that a person starts: it checks, starts servers and trainer ranks, waits, and ends them all."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron_stare.config import Config, check_config, dump_config
from megatron_stare.errors import UserError
from megatron_stare.rollout import Endpoints, RolloutError, ServerFleet
from megatron_stare.rollout.process import Child, end
from megatron_stare.run.files import RunFiles
from megatron_stare.run.health import Restarts, Watchdog
from megatron_stare.run.job import Job
from megatron_stare.run.node import ENDED, NodeRecord, locked, read_node, signal_ranks, silence, start_ranks
from megatron_stare.run.problems import record_problem
from megatron_stare.run.resume import check_allowances

DONE, FAILED, BAD_USAGE, PREEMPTED = 0, 1, 2, 75
_EXIT_CODES = {
    "done": DONE,
    "preempted": PREEMPTED,
    "refused": BAD_USAGE,
    "stopped": FAILED,
    "failed": FAILED,
}
_POLL_SECONDS = 0.2
_DUMP_SECONDS = 2.0  # for ranks to write their stacks
_LEAVE_SECONDS = 15.0  # for ranks that have recorded the outcome to be gone
_HEAD_SECONDS = 600.0  # for node 0 to appear
_SILENT_SECONDS = 120.0  # until it is taken for dead


class StopRequest:
    """Ctrl-C or SIGTERM. While there is nothing to save (not `patient`) it ends the run at once; later the
    first asks to save, and a second ends it at once."""

    def __init__(self):
        self.patient = False
        self.count = 0
        self.since = 0.0

    def __call__(self, _number=None, _frame=None) -> None:
        self.count += 1
        self.since = self.since or time.monotonic()
        if not self.patient or self.count > 1:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Receive the signals within this block."""
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def train(config: Config, job: Job | None = None) -> int:
    """Run this node's part of `config` to its end. Returns the exit code.

    Raises UserError before anything is started.
    """
    job = job or Job.single(config)
    check_config(config, job.world_size)
    check_allowances(config)
    files = RunFiles.of(config)
    if not job.head:
        _wait_for_head(files, job)
        return _Node(config, files, job).run()
    try:
        files.logs.mkdir(parents=True, exist_ok=True)
        with locked(files):
            _prepare(config, files)
            return _Node(config, files, job).run()
    except OSError as error:
        raise UserError(f"run.dir={files.root}: {error.strerror or error} ({error.filename})") from None


class _Node:
    """Starts this node's servers and ranks, keeps them alive, and ends them."""

    def __init__(self, config: Config, files: RunFiles, job: Job) -> None:
        self.config, self.files, self.job = config, files, job
        self.stop = StopRequest()
        self.record = NodeRecord(files, job)
        self.fleet = _fleet(config, files, job)
        self.ranks: Child | None = None
        self.watchdog = Watchdog(config.run, files.progress)
        self.restarts = Restarts(config.run.restarts, files.progress)
        self.endpoints: Endpoints | None = None
        self._over_since = 0.0

    def run(self) -> int:
        """To the end of the run, of this node's part in it, or to a signal."""
        state, message = "failed", ""
        with self.stop.listening():
            try:
                self.job.require_ports()
                self._start()
                state, message = self._wait() if self.job.trains else self._wait_for_others()
                if state == "preempted" and self.job.head:
                    _say(f"stopped after {message} and saved; continue with resume.mode=auto")
            except RolloutError as error:
                message = str(error)
                print(f"error: {message}", file=sys.stderr)
            except KeyboardInterrupt:
                if not self.stop.patient:
                    state = "preempted"
                    _say("stopped before training started; nothing to save")
                else:
                    print("stopped at once; work since the last checkpoint is lost", file=sys.stderr)
            finally:
                # Another Ctrl-C must not leave processes behind.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                if self.ranks:
                    end([self.ranks])
                self.fleet.stop()
                if self.job.head:
                    self.files.stop_request.unlink(missing_ok=True)
                self.record.close(state, message.partition("\n")[0])
        return _EXIT_CODES[state]

    def _start(self) -> None:
        if self.config.objective == "rl":
            _say("starting SGLang servers")
            self.endpoints = self.fleet.start(_say)
        if self.job.trains:
            count = self.job.ranks_per_node
            _say(f"starting {count} trainer rank{'s' if count > 1 else ''}")
            self._start_ranks()
        self.record.update(state="running")
        self.stop.patient = True

    def _start_ranks(self) -> None:
        self.ranks = start_ranks(self.files, self.job, self.endpoints, self.config.run.restarts)
        self.watchdog.restarted()

    def _wait(self) -> tuple[str, str]:
        """Until the run ends: state and a sentence. Ranks that fail are started again, within limits."""
        asked = False
        while True:
            if self.stop.count and not asked:
                asked = True
                self.files.stop_request.touch()
                self.record.update(state="stopping")
                _say("stopping: saving the last finished step (press Ctrl-C again to stop at once)")
            if asked and time.monotonic() - self.stop.since > self.config.run.grace_seconds:
                return "failed", self._fail(f"not saved within {self.config.run.grace_seconds:g} s")
            self._tend()
            if self.ranks.exit_reason() is None and not self._is_over():
                time.sleep(_POLL_SECONDS)
                continue
            state, message = self._outcome()
            if state == "failed" and not asked and self.restarts.allowed():
                record_problem(self.files.problems, "trainer", f"{message}; starting the ranks again")
                end([self.ranks])
                self._start_ranks()
                continue
            if state == "failed" and not self.job.head:
                return "preempted", "its ranks lost the others"  # whether the run failed, the head knows
            return state, message

    def _tend(self) -> None:
        """Look after servers and ranks; called several times a second."""
        self.fleet.watch()
        children = {**self.fleet.pids, **({"trainer": self.ranks.pid} if self.ranks else {})}
        self.record.update_children(children, self.restarts.total)
        if self.job.head and self.ranks and (found := self.watchdog.overdue()):
            record_problem(self.files.problems, "trainer", f"{found}; its stacks are in logs/trainer-*.log")
            signal_ranks(self.ranks, signal.SIGUSR1)
            time.sleep(_DUMP_SECONDS)
            # What can be saved is saved already: the last checkpoint, and the journal of the steps since.
            signal_ranks(self.ranks, signal.SIGKILL)
            self.watchdog.restarted()

    def _wait_for_others(self) -> tuple[str, str]:
        """On a node without ranks: keep the servers until the head's part has ended, or to a signal."""
        while True:
            self._tend()
            head = read_node(self.files, 0)
            if head.get("job") == self.job.id and head.get("state") in ENDED:
                return head["state"], head.get("message", "")
            if silence(head) > _SILENT_SECONDS:
                return "preempted", "node 0 gave no sign of life any more"
            if self.stop.count and time.monotonic() - self.stop.since > self.config.run.grace_seconds:
                return "preempted", "signalled"
            time.sleep(_POLL_SECONDS)

    def _outcome(self) -> tuple[str, str]:
        """How the ranks ended. What a person must know of it is said."""
        unknown = {"outcome": "failed", "message": f"the trainer {self.ranks.exit_reason()}", "rank": 0}
        outcome, message, rank = (unknown | self._recorded()).values()
        if outcome == "refused":
            for line in message.splitlines():
                print(f"error: {line}", file=sys.stderr)
        elif outcome in ("failed", "stopped"):
            named = self.files.logs / f"trainer-{rank}.log"
            log = named if named.exists() else self.ranks.log
            self._fail(f"{message}\nerror: the whole story is in {log}")
        return outcome, message

    def _is_over(self) -> bool:
        """Whether the run has ended, though torchrun has not."""
        found = self._recorded().get("outcome")
        if found in ("refused", "stopped"):  # and would end so again: the ranks are not to start anew
            return True
        # All is written; but torchrun, after a restart, now and then waits for ranks that are gone.
        self._over_since = self._over_since or time.monotonic() if found in ("done", "preempted") else 0.0
        return bool(self._over_since) and time.monotonic() - self._over_since > _LEAVE_SECONDS

    def _recorded(self) -> dict[str, Any]:
        """What a rank has left of how it ended; empty while none has."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self.files.outcome.read_text(encoding="utf-8"))
            if isinstance(found, dict) and found.keys() == {"outcome", "message", "rank"}:
                return found
        return {}

    def _fail(self, message: str) -> str:
        print(f"error: {message}", file=sys.stderr)
        return message


def _fleet(config: Config, files: RunFiles, job: Job) -> ServerFleet:
    model = config.rollout.model_path or config.model.path
    on_problem = partial(record_problem, files.problems)
    return ServerFleet(
        config.rollout,
        model,
        config.model.dtype,
        files.root,
        config.run.seed,
        plan=job.fleet,
        on_problem=on_problem,
    )


def serve(config: Config) -> int:
    """Start the servers and the router of `config`, print where they are, and keep them until a signal."""
    files = RunFiles.of(config)
    fleet = _fleet(config, files, Job.single(config))
    stop = StopRequest()
    with stop.listening():
        try:
            endpoints = fleet.start(_say)
            for url in [*endpoints.servers, *([endpoints.router] if endpoints.router else [])]:
                print(url)
            print(f"API key: {endpoints.api_key}\nCtrl-C ends them", flush=True)
            while True:
                fleet.watch()
                time.sleep(_POLL_SECONDS)
        except RolloutError as error:
            print(f"error: {error}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            return DONE
        finally:
            fleet.stop()


def _prepare(config: Config, files: RunFiles) -> None:
    # From here on the directory holds a run: ranks that start again, and a job that is requeued, go on.
    resume = config.resume.model_copy(update={"mode": "auto"})
    saved = dump_config(config.model_copy(update={"resume": resume}))
    files.config.write_text(saved, encoding="utf-8")
    for stale in (files.stop_request, files.outcome, files.progress):
        stale.unlink(missing_ok=True)
    _say(f"run directory {files.root}")


def _wait_for_head(files: RunFiles, job: Job) -> None:
    """Until node 0 of the same job has written the config. Raises UserError where it does not come."""
    deadline = time.monotonic() + _HEAD_SECONDS
    while not _is_alive(read_node(files, 0), job):
        if time.monotonic() > deadline:
            raise UserError(
                f"run.dir={files.root}: node 0 of job {job.id} did not appear there within "
                f"{_HEAD_SECONDS:g} s; do all nodes see the same directory?"
            )
        time.sleep(_POLL_SECONDS)


def _is_alive(head: dict[str, Any], job: Job) -> bool:
    """Whether this is a sign of life of this start of the job, not of an earlier one that bore its name."""
    return head.get("job") == job.id and head.get("state") not in ENDED and silence(head) < _SILENT_SECONDS


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
