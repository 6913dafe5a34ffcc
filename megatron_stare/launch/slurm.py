"""Slurm: the batch script of a job, and its submission."""

from __future__ import annotations

import re
import shlex
import subprocess

from megatron_stare.errors import UserError
from megatron_stare.launch.plan import Launch
from megatron_stare.launch.scripts import CONFIG_FILE, render

SCRIPT = "job.sbatch"
# A supervisor that is killed (out of memory) is started again so often; a run that saved, without limit.
_RESTARTS = 10
_STRAGGLER_SECONDS = 600
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")


def files(launch: Launch, options: dict[str, str | None]) -> dict[str, str]:
    """The files of the job by name.

    Args:
        options: further ones of sbatch (partition, account, time), None for flags. They replace ours of the
            same name, as `launch.options` do these; the value `no` leaves one out.

    Raises UserError when the time limit leaves no time to train.
    """
    logs = launch.files.logs
    wanted: dict[str, str | None] = {
        "job-name": launch.name,
        "nodes": str(launch.nodes),
        "ntasks-per-node": "1",
        "exclusive": None,
        "mem": "0",
        "chdir": str(launch.directory),
        "output": f"{logs}/slurm-%j.log",
        "open-mode": "append",
        "requeue": None,
        "signal": f"B:TERM@{launch.grace}",
    }
    if launch.gpus:
        wanted["gpus-per-node"] = str(launch.gpus)
    wanted |= options | dict(launch.options)
    _check_time(wanted.get("time"), launch.grace)
    lines = [
        name if value is None else f"{name}={shlex.quote(value)}"
        for name, value in wanted.items()
        if value != "no"
    ]
    srun = [
        f"--nodes={launch.nodes}",
        f"--ntasks={launch.nodes}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        # A node that ends early must not take the others with it: they may be saving.
        "--kill-on-bad-exit=0",
        # But all end soon after the first, unless something has gone wrong: then the job starts again.
        f"--wait={launch.grace + _STRAGGLER_SECONDS}",
        "--open-mode=append",
        f"--output={logs}/slurm-%j-node-%n.log",
    ]
    script = render(
        "job.sbatch.jinja",
        launch,
        options=lines,
        # Within the single quotes of a trap.
        stop_request=shlex.quote(str(launch.files.stop_request)).replace("'", "'\\''"),
        srun_options=shlex.join(srun),
        restarts=_RESTARTS,
    )
    return {CONFIG_FILE: launch.config_text, SCRIPT: script}


def submit(launch: Launch) -> str:
    """Hand the script to sbatch. Returns the job's id; raises UserError with what sbatch said."""
    launch.files.logs.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(launch.folder / SCRIPT)], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise UserError(
            "--scheduler=slurm: there is no sbatch here; launch from a login node of the cluster, "
            "or use --dry-run"
        ) from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"--scheduler=slurm: {error.stderr.strip() or 'sbatch failed'}") from None
    return done.stdout.strip().partition(";")[0]


def _check_time(limit: str | None, grace: int) -> None:
    """Slurm would signal a job at its very start whose time is shorter than that for saving."""
    if limit is None or not (found := _TIME.fullmatch(limit)):
        return
    parts = [int(part) for part in found["rest"].split(":")]
    if found["days"] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        total = ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    elif len(parts) < 3:  # minutes[:seconds]
        total = parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)
    else:
        total = (parts[0] * 60 + parts[1]) * 60 + parts[2]
    if 0 < total <= grace:
        raise UserError(
            f"--time={limit}: is not longer than the {grace} s that are kept for saving "
            "(run.grace_seconds and a minute); nothing would be trained"
        )
