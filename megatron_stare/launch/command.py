"""The command `launch`: its options, and what it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from megatron_stare.launch.plan import Launch

_POSITIVE = click.IntRange(min=1)


def launch_options(command: Callable) -> Callable:
    """All options of `launch`, after CONFIG and its overrides."""
    options = [
        click.option("--scheduler", type=click.Choice(["slurm", "kubernetes", "torchrun"]), required=True,
                     help="torchrun: none; writes a script to start on each node."),
        click.option("--nodes", type=_POSITIVE, default=1, show_default=True),
        click.option("--trainer-nodes", type=_POSITIVE,
                     help="The first so many train, servers run on the others; default: all do both."),
        click.option("--gpus-per-node", "gpus", type=click.IntRange(min=0), default=0, show_default=True,
                     help="0: nodes without GPUs."),
        click.option("--port", type=click.IntRange(1024, 65_000),
                     help="First of the job's 40 ports; default: from the job's number."),
        click.option("--option", "options", multiple=True, metavar="NAME[=VALUE]",
                     help="Slurm: a further option of sbatch. Kubernetes: a resource of a pod, as cpu=32."),
        click.option("--output", type=click.Path(path_type=Path),
                     help="Where the job's files are written; default: RUN/launch."),
        click.option("--dry-run", is_flag=True, help="Write the files and show them; submit nothing."),
        click.option("--partition", help="Slurm."),
        click.option("--account", help="Slurm."),
        click.option("--time", help="Slurm: limit, for example 2-00:00:00. The run saves before it."),
        click.option("--image", help="Kubernetes: the container image."),
        click.option("--namespace", help="Kubernetes."),
        click.option("--volume", "volumes", multiple=True, metavar="CLAIM:PATH",
                     help="Kubernetes: a persistent volume claim and its place in all pods."),
        click.option("--workdir",
                     help="Kubernetes: where the config's relative paths start; default: the image's."),
        click.option("--hosts", metavar="A,B,...", help="torchrun: the nodes, trainers first."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


_OWN = {
    "slurm": {"partition", "account", "time"},
    "kubernetes": {"image", "namespace", "volumes", "workdir"},
    "torchrun": {"hosts"},
}


def launch_command(
    config: Path, overrides: list[str], *, scheduler: str, dry_run: bool, **options: Any
) -> None:
    """Check the config, write the job's files, and submit them or show them.

    Raises UserError before anything is submitted; also when the scheduler refuses.
    """
    from megatron_stare.launch.plan import plan_launch, write
    from megatron_stare.launch.scripts import CONFIG_FILE

    _refuse_others(scheduler, options)
    launch = plan_launch(
        config,
        overrides,
        nodes=options["nodes"],
        trainer_nodes=options["trainer_nodes"],
        gpus=options["gpus"],
        options=options["options"],
        port=options["port"],
        output=options["output"],
        elsewhere=scheduler == "kubernetes",
    )
    if scheduler == "kubernetes" and not launch.checked:
        click.echo(
            f"model.path={launch.config.model.path} is not here: what needs the model, the data or the run "
            "directory is checked in the cluster",
            err=True,
        )
    texts, submit = _STARTS[scheduler](launch, options)
    write(launch.folder, texts)
    if dry_run:
        for name, text in texts.items():
            shown = text if name != CONFIG_FILE else "# the whole resolved configuration\n"
            click.echo(f"# ---- {launch.folder / name}\n{shown}")
        return
    submit()


def _refuse_others(scheduler: str, options: dict[str, Any]) -> None:
    from megatron_stare.errors import UserError

    for owner, names in _OWN.items():
        given = [name for name in sorted(names) if options[name]] if owner != scheduler else []
        if given:
            flag = given[0].removesuffix("s") if given[0] == "volumes" else given[0]
            raise UserError(f"--{flag}: belongs to --scheduler={owner}, not to {scheduler}")


_Start = tuple[dict[str, str], Callable[[], None]]


def _slurm(launch: Launch, options: dict[str, Any]) -> _Start:
    from megatron_stare.launch import slurm

    given = {name: options[name] for name in ("partition", "account", "time") if options[name]}

    def submit() -> None:
        click.echo(f"submitted job {slurm.submit(launch)}; megatron-stare status {launch.files.root}")

    return slurm.files(launch, given), submit


def _kubernetes(launch: Launch, options: dict[str, Any]) -> _Start:
    from megatron_stare.errors import UserError
    from megatron_stare.launch import kubernetes

    if not options["image"]:
        raise UserError("--image: is missing; name the container image that pods run")
    cluster = kubernetes.Cluster(
        options["image"], options["volumes"], options["namespace"], options["workdir"]
    )

    def submit() -> None:
        name = kubernetes.submit(launch, cluster)
        click.echo(f"created job {name}; its pods: kubectl get pods -l app.kubernetes.io/instance={name}")

    return kubernetes.files(launch, cluster), submit


def _torchrun(launch: Launch, options: dict[str, Any]) -> _Start:
    from megatron_stare.launch import by_hand

    def submit() -> None:
        click.echo("start it on every node, for example:")
        for line in by_hand.instructions(launch, options["hosts"]):
            click.echo(f"  {line}")

    return by_hand.files(launch, options["hosts"]), submit


_STARTS: dict[str, Callable[[Launch, dict[str, Any]], _Start]] = {
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "torchrun": _torchrun,
}
