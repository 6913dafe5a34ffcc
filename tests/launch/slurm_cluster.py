"""A real Slurm on this machine: munged, slurmctld and two slurmd that stand for two nodes.

Everything lies in one scratch directory and on free ports; nothing of the system's own Slurm is used or
changed. Needs root (slurmd starts processes of other users) and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NODES = ("n1", "n2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
_CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ctld}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_interval=1
ReturnToService=2
MpiDefault=none
KillWait=5
NodeName=DEFAULT CPUs=1 RealMemory=2000 State=UNKNOWN
NodeName={first} NodeHostName=localhost NodeAddr=127.0.0.1 Port={port1}
NodeName={second} NodeHostName=localhost NodeAddr=127.0.0.1 Port={port2}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no Slurm can be started here; None if it can."""
    if os.getuid() != 0:
        return "a Slurm of our own needs root"
    absent = [name for name in _PROGRAMS if _program(name) is None]
    return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else None


class SlurmCluster:
    """Two idle nodes, as long as the `running` block lasts. Programs find it by `environment`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self._daemons: list[subprocess.Popen] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[SlurmCluster]:
        """Start all daemons, and end them and every job in the end."""
        try:
            self._start()
            yield self
        finally:
            self._stop()

    def call(self, *command: str, check: bool = True) -> str:
        """Output of a Slurm command."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, ExitCode, Restarts, ..."""
        shown = self.call("scontrol", "--oneliner", "show", "job", number)
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        logs = sorted(self.root.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def _start(self) -> None:
        root = self.root
        for folder in ("state", *(f"spool-{node}" for node in NODES)):
            (root / folder).mkdir(parents=True)
        key = root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ctld, port1, port2 = _free_ports(3)
        (root / "slurm.conf").write_text(
            _CONF.format(root=root, ctld=ctld, port1=port1, port2=port2, first=NODES[0], second=NODES[1])
        )
        # --force: the scratch directory lies below one that everybody may write to.
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={root}/munge.socket",
            f"--pid-file={root}/munged.pid", f"--log-file={root}/munged.log",
            f"--seed-file={root}/munge.seed",
        )  # fmt: skip
        wait_for((root / "munge.socket").exists, 10, self.logs)
        self._daemon("slurmctld", "-D", "-f", str(root / "slurm.conf"))
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node, "-f", str(root / "slurm.conf"))
        wait_for(self._idle, 40, self.logs)

    def _idle(self) -> bool:
        states = self.call("sinfo", "-h", "-N", "-o", "%T", check=False).split()
        return states == ["idle"] * len(NODES)

    def _daemon(self, name: str, *arguments: str) -> None:
        program = _program(name)
        assert program
        with (self.root / f"{name}-{len(self._daemons)}.output.log").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [program, *arguments],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def _stop(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired, AssertionError):
            if self.call("squeue", "-h", check=False):
                self.call("scancel", "--user=root", check=False)
                wait_for(lambda: not self.call("squeue", "-h", check=False), 20, self.logs)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def wait_for(condition: Callable[[], bool], seconds: float, describe: Callable[[], str]) -> None:
    """Poll; fails with `describe()` when time is up."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.2)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
