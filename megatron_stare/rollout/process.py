"""A child process in its own session, with its log, and the certainty that its whole group ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from megatron_stare.rollout.child import PARENT_VARIABLE

LOG_LINES = 15


class Child:
    """One `python -m MODULE ARGS` that writes to a log file; with `show`, only its standard error goes there.

    It leads its own session, so that Ctrl-C in the terminal reaches only this process, which then
    ends the others in order. It asks the kernel to be killed when the *thread* that started it ends
    (child.die_with_parent): start it from a thread that lives as long as the fleet.

    Its temporary directory is its own and goes when it is ended: else SGLang's sockets, torchrun's logs and
    wandb's directories would stay, for these processes end without cleaning up.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: list[str],
        environment: Mapping[str, str],
        log: Path,
        show: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.scratch = tempfile.TemporaryDirectory(prefix="megatron-stare-", ignore_cleanup_errors=True)
        own = {"TMPDIR": self.scratch.name, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        # Ours come last: when a process sets the variable that is first in its environment, setproctitle no
        # longer finds its arguments, and SGLang sets the cache directory.
        variables = {**os.environ, **environment, **own}
        variables.setdefault("TORCHINDUCTOR_CACHE_DIR", _kernels())
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=None if show else output,
                stderr=output,
                start_new_session=True,
                env=variables,
            )

    @property
    def pid(self) -> int:
        """Process id, which is also the group's."""
        return self.process.pid

    def exit_reason(self) -> str | None:
        """How it ended, for a person; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def log_tail(self) -> str:
        """The log's last lines, each indented."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        except OSError as error:
            lines = [str(error)]
        return "\n".join(f"  | {line[:300]}" for line in lines)


def end(children: list[Child], grace: float = 1.0) -> None:
    """End the groups of all `children`: SIGTERM, `grace` seconds together, then SIGKILL. Idempotent.

    The grace is short because a server has nothing to save, and takes 5 s to find that out itself.
    """
    members = {child.pid: _descendants(child.pid) for child in children}
    for child in children:
        _signal_group(child, signal.SIGTERM)
    everyone = [process for group in members.values() for process in group]
    deadline = time.monotonic() + grace
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        _signal_group(child, signal.SIGKILL)
        child.process.wait()
    # Anything that left the group, found before its parent was gone.
    _, alive = psutil.wait_procs(everyone, timeout=0.5)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)
    for child in children:
        child.scratch.cleanup()


def _kernels() -> str:
    """Where compiled kernels are kept from run to run; torch's default is in the temporary directory."""
    return str(Path(tempfile.gettempdir()) / f"torchinductor-{os.getuid()}")


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _signal_group(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)
