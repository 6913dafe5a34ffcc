"""No scheduler: a script that a person, or their own tools, starts on every node."""

from __future__ import annotations

import shlex

from megatron_stare.errors import UserError
from megatron_stare.launch.plan import Launch
from megatron_stare.launch.scripts import CONFIG_FILE, render

SCRIPT = "node.sh"


def files(launch: Launch, hosts: str | None) -> dict[str, str]:
    """The files of the job by name.

    Args:
        hosts: the nodes' names, trainers first, separated by commas.

    Raises UserError when these are not as many as the job's nodes.
    """
    names = [name for name in (hosts or "").split(",") if name]
    if len(names) != launch.nodes:
        raise UserError(
            f"--hosts={hosts or ''}: names {len(names)} nodes; --scheduler=torchrun needs all "
            f"{launch.nodes}, trainers first, separated by commas"
        )
    script = render(
        "node.sh.jinja",
        launch,
        hosts=shlex.quote(",".join(names)),
        last=launch.nodes - 1,
        directory=shlex.quote(str(launch.directory)),
    )
    return {CONFIG_FILE: launch.config_text, SCRIPT: script}


def instructions(launch: Launch, hosts: str) -> list[str]:
    """What to type, one line a node."""
    script = shlex.quote(str(launch.folder / SCRIPT))
    lines = []
    if launch.needs_key:
        lines.append("KEY=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \\n')")
    for index, host in enumerate(filter(None, hosts.split(","))):
        # By a pipe of the shell's own: neither a command line nor a file shows it.
        feed = "printf '%s\\n' \"$KEY\" | " if launch.needs_key else ""
        lines.append(f"{feed}ssh {host} {script} {index} &")
    return lines
