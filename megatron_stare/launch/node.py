"""What a launched job runs on every node: `python -m megatron_stare.launch.node CONFIG`.

It adds to the environment what only this node can tell, and becomes `megatron-stare train CONFIG`: the same
process, so that the scheduler's signals reach the supervisor.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NoReturn

from megatron_stare.run.job import HOSTS_VARIABLE, NODE_VARIABLE

_SAY_SECONDS = 60.0


def node_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The job's variables that follow from the scheduler's own. Waits for pods without an address yet."""
    found = {}
    if NODE_VARIABLE not in environment:
        for variable in ("SLURM_NODEID", "JOB_COMPLETION_INDEX"):
            if variable in environment:
                found[NODE_VARIABLE] = environment[variable]
    hosts = environment.get(HOSTS_VARIABLE, "").split(",")
    if "SLURM_JOB_ID" in environment:
        found[HOSTS_VARIABLE] = ",".join(name if resolves(name) else _slurm_address(name) for name in hosts)
    elif "JOB_COMPLETION_INDEX" in environment:
        for name in hosts:
            _wait_for(name)
    return found


def resolves(name: str) -> bool:
    """Whether the name leads to an address."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def _slurm_address(name: str) -> str:
    """The address by which Slurm reaches a node whose name nobody else knows; the name if it cannot tell."""
    try:
        shown = subprocess.run(["scontrol", "show", "node", name], capture_output=True, text=True).stdout
    except OSError:
        return name
    found = re.search(r"NodeAddr=(\S+)", shown)
    return found[1] if found else name


def _wait_for(name: str) -> None:
    """Pods of a job start one after another, and have no name before."""
    said = float("-inf")
    while not resolves(name):
        if time.monotonic() - said > _SAY_SECONDS:
            said = time.monotonic()
            print(f"waiting for {name}, which has no address yet", file=sys.stderr, flush=True)
        time.sleep(1.0)


def main() -> NoReturn:
    """Become the supervisor of this node."""
    environment = {**os.environ, **node_environment(os.environ)}
    command = [sys.executable, "-m", "megatron_stare", "train", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
