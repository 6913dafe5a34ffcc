"""What a launch is: a checked configuration, and how it lies on nodes. Schedulers' files follow from it."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_stare.config import Config, dump_config, find_problems, load_config, run_directory
from megatron_stare.config.load import ConfigError
from megatron_stare.errors import UserError
from megatron_stare.run import job
from megatron_stare.run.files import RunFiles
from megatron_stare.run.layout import ranks_per_node, starts_servers

# Between the end of run.grace_seconds and the scheduler's SIGKILL.
MARGIN_SECONDS = 60


@dataclass(frozen=True)
class Launch:
    """One run on `nodes` nodes, of which the first `trainer_nodes` train.

    Attributes:
        config: as the job will run it: it goes on where it was whenever it is started again.
        gpus: of one node; 0: none are asked for.
        options: what else to ask of the scheduler, by its own names; None for those without a value.
        directory: where relative paths of the config start, and the user's modules are found.
        python: the interpreter that nodes use.
        output: where the job's files are written, in place of RUN/launch.
        checked: whether the model, the data and the run directory were here to be checked.
    """

    config: Config
    nodes: int
    trainer_nodes: int
    ranks: int
    gpus: int = 0
    port: int | None = None
    options: Mapping[str, str | None] = field(default_factory=dict)
    directory: Path = field(default_factory=Path.cwd)
    python: str = sys.executable
    output: Path | None = None
    checked: bool = True

    @property
    def files(self) -> RunFiles:
        """The run directory."""
        return RunFiles(run_directory(self.config))

    @property
    def folder(self) -> Path:
        """Where the job's files are written."""
        return self.output or self.files.root / "launch"

    @property
    def name(self) -> str:
        """The job's name: what all schedulers allow of `run.name`."""
        name = re.sub(r"[^a-z0-9]+", "-", self.config.run.name.lower()).strip("-")
        return name[:40].strip("-") or "run"

    @property
    def grace(self) -> int:
        """Seconds that the scheduler must leave between SIGTERM and SIGKILL."""
        return int(self.config.run.grace_seconds) + MARGIN_SECONDS

    @property
    def needs_key(self) -> bool:
        """Whether the job has servers, which demand an API key."""
        return starts_servers(self.config)

    @property
    def config_text(self) -> str:
        """The config file of the job."""
        return dump_config(self.config)

    @property
    def exports(self) -> dict[str, str]:
        """Variables that are known before the job starts and equal on all nodes."""
        values = {
            job.TRAINER_NODES_VARIABLE: str(self.trainer_nodes),
            job.RANKS_VARIABLE: str(self.ranks),
        }
        if self.port is not None:
            values[job.PORT_VARIABLE] = str(self.port)
        return values


def plan_launch(
    path: Path,
    overrides: list[str],
    *,
    nodes: int,
    trainer_nodes: int | None,
    gpus: int,
    options: tuple[str, ...] = (),
    port: int | None = None,
    output: Path | None = None,
    elsewhere: bool = False,
) -> Launch:
    """Load and check the config in `path`, and lay it on the nodes.

    Args:
        elsewhere: the nodes' files may not be here; where the model is not, only values are checked.

    Raises UserError for everything that can be found wrong before the job starts.
    """
    config = load_config(path, overrides)
    trainers = nodes if trainer_nodes is None else trainer_nodes
    if trainers > nodes:
        raise UserError(f"--trainer-nodes={trainers}: more than --nodes={nodes}")
    ranks = ranks_per_node(config, nodes, trainers, gpus)
    checked = not elsewhere or (Path(config.model.path) / "config.json").is_file()
    if checked:
        with warnings.catch_warnings():
            # Megatron's, of packages that the nodes may have.
            warnings.simplefilter("ignore")
            problems = find_problems(_without_hardware(config, gpus), trainers * ranks)
        if problems:
            raise ConfigError(problems)
    config = _changed(
        config,
        run={"dir": str(run_directory(config).absolute())},
        resume={"mode": "auto"},
        parallel={"world_size": trainers * ranks},
    )
    return Launch(
        config,
        nodes,
        trainers,
        ranks,
        gpus,
        port,
        parse_options(options),
        output=output and output.absolute(),
        checked=checked,
    )


def parse_options(texts: tuple[str, ...]) -> dict[str, str | None]:
    """`NAME=VALUE` or `NAME`, as given to --option. Raises UserError for others."""
    options: dict[str, str | None] = {}
    for text in texts:
        name, has_value, value = text.lstrip("-").partition("=")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9./_-]*", name) or "\n" in value:
            raise UserError(f"--option {text!r}: must be NAME=VALUE or NAME")
        options[name] = value if has_value else None
    return options


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the files of a job. Raises UserError where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            file = folder / name
            file.write_text(text, encoding="utf-8")
            if text.startswith("#!"):
                os.chmod(file, 0o755)
    except OSError as error:
        raise UserError(f"{folder}: the job's files cannot be written there ({error.strerror})") from None


def _without_hardware(config: Config, gpus: int) -> Config:
    """`config` without what a machine without GPUs would refuse: nodes have them, and check it again."""
    if gpus == 0:
        return config
    return _changed(
        config,
        model={"layers": "auto", "fp8": "none", "fp8_parameters": False, "fp8_keep_ends": 0},
        parallel={"optimizer_offload": 0.0},
        rollout={"wire": "trainer"},
    )


def _changed(config: Config, **sections: dict) -> Config:
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )
