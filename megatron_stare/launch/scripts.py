"""Shell scripts from templates: what Slurm's and a hand-started job's scripts have in common."""

from __future__ import annotations

import shlex
from importlib import resources

import jinja2

from megatron_stare.launch.plan import Launch
from megatron_stare.run import job

CONFIG_FILE = "config.yaml"
_ENVIRONMENT = jinja2.Environment(
    undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
)


def render(template: str, launch: Launch, **values: object) -> str:
    """The template of that name with what every job's script needs, and `values`."""
    text = resources.files("megatron_stare.launch").joinpath("templates", template).read_text("utf-8")
    return _ENVIRONMENT.from_string(text).render(
        name=launch.name,
        roles=roles(launch),
        job_variable=job.JOB_VARIABLE,
        hosts_variable=job.HOSTS_VARIABLE,
        node_variable=job.NODE_VARIABLE,
        key_variable=job.API_KEY_VARIABLE if launch.needs_key else "",
        exports=[(name, shlex.quote(value)) for name, value in launch.exports.items()],
        command=shlex.join(node_command(launch)),
        **values,
    )


def node_command(launch: Launch) -> list[str]:
    """What runs on every node."""
    return [launch.python, "-m", "megatron_stare.launch.node", str(launch.folder / CONFIG_FILE)]


def roles(launch: Launch) -> str:
    """Who does what, for a person."""
    serving = launch.nodes - launch.trainer_nodes
    ranks = f"{launch.ranks} trainer rank{'s' if launch.ranks > 1 else ''} each"
    nodes = f"{launch.trainer_nodes} node{'s' if launch.trainer_nodes > 1 else ''} with {ranks}"
    if not launch.needs_key:
        return nodes
    servers = launch.config.rollout.servers
    on = f"{serving} further node{'s' if serving > 1 else ''}" if serving else "the same nodes"
    return f"{nodes}, {servers} SGLang server{'s' if servers > 1 else ''} on {on}"
