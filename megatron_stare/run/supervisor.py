"""The process that a person starts: it checks, starts servers and trainer ranks, waits, and ends them all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator

from megatron_stare.config import Config, check_config, dump_config
from megatron_stare.rollout import Endpoints, RolloutError, ServerFleet
from megatron_stare.rollout.process import Child, end
from megatron_stare.run.files import RunFiles
from megatron_stare.run.ranks import trainer_ranks

DONE, FAILED, BAD_USAGE, PREEMPTED = 0, 1, 2, 75
_EXIT_CODES = {"done": DONE, "preempted": PREEMPTED, "refused": BAD_USAGE, "failed": FAILED}
_POLL_SECONDS = 0.2


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


def train(config: Config) -> int:
    """Run `config` to its end. Returns the exit code; raises UserError before anything is started."""
    world_size = trainer_ranks(config)
    check_config(config, world_size)
    files = RunFiles.of(config)
    _prepare(config, files)
    stop = StopRequest()
    fleet = _fleet(config, files)
    ranks: Child | None = None
    with stop.listening():
        try:
            endpoints = None
            if config.objective == "rl":
                _say("starting SGLang servers")
                endpoints = fleet.start(_say)
            _say(f"starting {world_size} trainer rank{'s' if world_size > 1 else ''}")
            ranks = _start_ranks(config, files, world_size, endpoints)
            stop.patient = True
            return _wait(config, files, ranks, fleet, stop)
        except RolloutError as error:
            print(f"error: {error}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            if not stop.patient:
                _say("stopped before training started; nothing to save")
                return PREEMPTED
            print("stopped at once; work since the last checkpoint is lost", file=sys.stderr)
            return FAILED
        finally:
            # Another Ctrl-C must not leave processes behind.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            if ranks:
                end([ranks])
            fleet.stop()
            files.stop_request.unlink(missing_ok=True)


def _fleet(config: Config, files: RunFiles) -> ServerFleet:
    model = config.rollout.model_path or config.model.path
    return ServerFleet(config.rollout, model, config.model.dtype, files.root, config.run.seed)


def serve(config: Config) -> int:
    """Start the servers and the router of `config`, print where they are, and keep them until a signal."""
    files = RunFiles.of(config)
    fleet = _fleet(config, files)
    stop = StopRequest()
    with stop.listening():
        try:
            endpoints = fleet.start(_say)
            for url in [*endpoints.servers, *([endpoints.router] if endpoints.router else [])]:
                print(url)
            print(f"API key: {endpoints.api_key}\nCtrl-C ends them", flush=True)
            while True:
                fleet.check()
                time.sleep(_POLL_SECONDS)
        except RolloutError as error:
            print(f"error: {error}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            return DONE
        finally:
            fleet.stop()


def _prepare(config: Config, files: RunFiles) -> None:
    files.logs.mkdir(parents=True, exist_ok=True)
    files.config.write_text(dump_config(config), encoding="utf-8")
    files.stop_request.unlink(missing_ok=True)
    files.outcome.unlink(missing_ok=True)
    _say(f"run directory {files.root}")


def _start_ranks(config: Config, files: RunFiles, world_size: int, endpoints: Endpoints | None) -> Child:
    """torchrun over this node's ranks. Rank 0 writes to this terminal, all ranks to RUN/logs."""
    arguments = [
        *("--nnodes", "1", "--nproc-per-node", str(world_size)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        *("-m", "megatron_stare.run.worker", str(files.root)),
    ]
    environment = {
        # Without it torchrun sets 1 as well, but says so at length.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Tokenizers warn after a fork otherwise.
        "TOKENIZERS_PARALLELISM": "false",
        # User code named in the config (task.source, task.reward) is found from where the person stands.
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")])),
        **(endpoints.to_env() if endpoints else {}),
    }
    log = files.logs / "torchrun.log"
    return Child("trainer", "megatron_stare.run.torchrun", arguments, environment, log, show=True)


def _wait(config: Config, files: RunFiles, ranks: Child, fleet: ServerFleet, stop: StopRequest) -> int:
    """Wait for the ranks; hand a stop request on; give up when a server dies or the grace is over."""
    asked = False
    while ranks.exit_reason() is None:
        if stop.count and not asked:
            asked = True
            files.stop_request.touch()
            _say("stopping: saving the last finished step (press Ctrl-C again to stop at once)")
        if asked and time.monotonic() - stop.since > config.run.grace_seconds:
            _say(f"error: not saved within run.grace_seconds={config.run.grace_seconds:g}; ended")
            return FAILED
        fleet.check()
        time.sleep(_POLL_SECONDS)
    return _report_outcome(files, ranks)


def _report_outcome(files: RunFiles, ranks: Child) -> int:
    try:
        record = json.loads(files.outcome.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {"outcome": "failed", "message": f"the trainer {ranks.exit_reason()}", "rank": 0}
    outcome, message = record["outcome"], record["message"]
    if outcome == "refused":
        for line in message.splitlines():
            print(f"error: {line}", file=sys.stderr)
    elif outcome == "failed":
        named = files.logs / f"trainer-{record['rank']}.log"
        log = named if named.exists() else ranks.log
        print(f"error: {message}\nerror: the whole story is in {log}", file=sys.stderr)
    elif outcome == "preempted":
        _say(f"stopped after {message} and saved; continue with resume.mode=auto")
    return _EXIT_CODES[outcome]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
