"""One node of a job: its record for others to read, the lock on the run directory, its trainer ranks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from megatron_stare.errors import UserError
from megatron_stare.rollout import Endpoints
from megatron_stare.rollout.process import Child
from megatron_stare.run.files import RunFiles
from megatron_stare.run.health import replace_json
from megatron_stare.run.job import Job

HEARTBEAT_SECONDS = 2.0
ENDED = ("done", "failed", "preempted", "refused", "stopped")


class NodeRecord:
    """RUN/nodes/N.json: what this node runs, renewed every few seconds by a thread of its own."""

    def __init__(self, files: RunFiles, job: Job) -> None:
        files.nodes.mkdir(parents=True, exist_ok=True)
        self._path = files.nodes / f"{job.node}.json"
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._content: dict[str, Any] = {
            "job": job.id,
            "node": job.node,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
            "state": "starting",
            "message": "",
            "children": {},
            "restarts": 0,
        }
        self.update()
        self._thread = threading.Thread(target=self._beat, name="node-record", daemon=True)
        self._thread.start()

    def update(self, **changes: Any) -> None:
        """Change what is recorded, and write it."""
        with self._lock:
            self._content |= changes
            replace_json(self._path, self._content | {"heartbeat": time.time()})

    def update_children(self, children: dict[str, int], restarts: int) -> None:
        """As update(), at once only where something changed."""
        changes = {"children": children, "restarts": restarts}
        if any(self._content[key] != value for key, value in changes.items()):
            self.update(**changes)

    def close(self, state: str, message: str = "") -> None:
        """The node has ended; nothing is written after this."""
        self._ended.set()
        self._thread.join()
        self.update(state=state, message=message, children={})

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            self.update()


def read_node(files: RunFiles, node: int) -> dict[str, Any]:
    """A node's record; empty where there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((files.nodes / f"{node}.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def silence(record: dict[str, Any]) -> float:
    """Seconds since a node's last sign of life; 0 where there is no record."""
    return max(0.0, time.time() - record.get("heartbeat", time.time()))


@contextlib.contextmanager
def locked(files: RunFiles) -> Iterator[None]:
    """Hold the run directory, at most until this process ends. Raises UserError while another job does."""
    with files.lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_node(files, 0)
            raise UserError(
                f"run.dir={files.root}: a run is going on in it (process {holder.get('pid')} on "
                f"{holder.get('host')}); end that one first, or choose another directory"
            ) from None
        yield


def start_ranks(files: RunFiles, job: Job, endpoints: Endpoints | None, restarts: int) -> Child:
    """torchrun over this node's ranks. Rank 0 writes to this terminal, all ranks to RUN/logs."""
    program = ["megatron_stare.run.worker", str(files.root)]
    return torchrun(program, files, job, endpoints.to_env() if endpoints else {}, restarts)


def torchrun(
    program: list[str], files: RunFiles, job: Job, environment: dict[str, str], restarts: int
) -> Child:
    """torchrun over this node's ranks of `program`, a module and its arguments."""
    arguments = [*job.torchrun_arguments(), "--max-restarts", str(restarts), "-m", *program]
    environment = {
        **job.environment(),
        # User code named in the config (task.source, task.reward) is found from where the person stands.
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")])),
        **environment,
    }
    log = files.logs / ("torchrun.log" if job.head else f"torchrun-{job.node}.log")
    return Child("trainer", "megatron_stare.run.torchrun", arguments, environment, log, show=job.trains)


def signal_ranks(ranks: Child, number: signal.Signals) -> None:
    """Send a signal to this node's trainer ranks, which are torchrun's children; not to theirs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(ranks.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
