"""Places that metrics are also sent to: TensorBoard and Weights & Biases."""

from __future__ import annotations

import logging
import netrc
import os
import uuid
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from megatron_stare.config.schema import Config
from megatron_stare.report.metrics import Row

logger = logging.getLogger(__name__)

WANDB_ID_FILE = "wandb_id"


class Sink(Protocol):
    """Takes a step's metrics."""

    def write(self, row: Row) -> None: ...

    def close(self, outcome: str) -> None: ...


def open_sinks(config: Config, run_dir: Path, start_step: int) -> list[Sink]:
    """The sinks that the configuration asks for. One that cannot be opened is reported and left out:
    a logging service that is away must not stop a run."""
    wanted: list[tuple[str, Any]] = []
    if config.report.tensorboard:
        wanted.append(("TensorBoard", lambda: TensorBoardSink(run_dir / "tensorboard", start_step)))
    if config.report.wandb:
        wanted.append(("wandb", lambda: WandbSink(config, run_dir)))
    sinks: list[Sink] = []
    for name, make in wanted:
        try:
            sinks.append(make())
        except Exception as error:
            logger.warning("no metrics go to %s: %s: %s", name, type(error).__name__, error)
    return sinks


class TensorBoardSink:
    """Event files in a directory; on resume, steps that will be repeated are hidden."""

    def __init__(self, directory: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=start_step)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["step"], new_style=True)
        self._writer.flush()

    def close(self, outcome: str) -> None:
        self._writer.close()


class WandbSink:
    """A wandb run: online where someone is logged in, else offline files for `wandb sync`.

    The run's id is kept in the run directory, so a resumed run continues the same one. The step is sent
    as a metric and the axis of all others, because wandb drops rows whose own step goes backwards.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb

        run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run_dir / WANDB_ID_FILE
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12] + "\n")
        mode = wandb_mode()
        arguments: dict[str, Any] = dict(
            project=config.report.wandb_project,
            name=config.run.name,
            id=id_file.read_text().strip(),
            dir=str(run_dir),
            resume="allow",
            config=config.model_dump(mode="json"),
            # console="off": wandb's capture of stdout would break the live line
            settings=wandb.Settings(console="off", silent=True),
        )
        try:
            self._run = wandb.init(mode=mode, **arguments)
        except Exception as error:
            if mode != "online":
                raise
            logger.warning("wandb is not reachable (%s); it is written offline in %s", error, run_dir)
            self._run = wandb.init(mode="offline", **arguments)
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if v is not None})

    def close(self, outcome: str) -> None:
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome in ("done", "preempted") else 1)


def wandb_mode() -> str:
    """WANDB_MODE if it is set; else online if wandb finds an API key (environment, netrc), else offline."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for name in files:
        try:
            if netrc.netrc(os.path.expanduser(name)).authenticators(host):
                return "online"
        except (OSError, netrc.NetrcParseError):
            continue
    return "offline"
