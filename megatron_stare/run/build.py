"""Puts a rank's session together, fresh or from the last good checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.engine.device import current
from megatron_stare.engine.engine import Engine
from megatron_stare.engine.parallel import initialize
from megatron_stare.engine.saving import newest_good
from megatron_stare.errors import UserError
from megatron_stare.report import Reporter
from megatron_stare.rollout import Endpoints, RolloutClient, make_publisher
from megatron_stare.run.files import RunFiles
from megatron_stare.run.health import Pulse
from megatron_stare.run.journal import Journal
from megatron_stare.run.keeping import Keeping
from megatron_stare.run.problems import recorder
from megatron_stare.run.resume import binding_values, check_same, saved_values
from megatron_stare.run.sampling import Sampler
from megatron_stare.run.session import Session
from megatron_stare.run.state import RunState
from megatron_stare.run.supervised import RowFeed
from megatron_stare.tasks import load_tokenizer
from megatron_stare.weights.publication import damaged


def build_engine(config: Config) -> Engine:
    """Join the run's process groups and load the model; collective."""
    device, layout = current(), config.parallel
    parallel = initialize(
        device,
        **layout.groups,
        seed=config.run.seed,
        timeout_minutes=layout.timeout_minutes,
    )
    return Engine(config, device, parallel)


def build_session(config: Config, engine: Engine, files: RunFiles, stop: Callable[[], bool]) -> Session:
    """The session of this rank; collective where a checkpoint is loaded."""
    state = restore(config, engine, files)
    source = publisher = reporter = journal = pulse = None
    if engine.parallel.rank == 0:
        tokenizer = load_tokenizer(config.model.path)
        if config.objective == "rl":
            journal = open_journal(config, files)
            endpoints = Endpoints.from_env()
            client = RolloutClient(endpoints, config.rollout, vocab_size=engine.hf.vocab_size)
            source = Sampler(config, tokenizer, client, stop, files.logs / "rewards.log", journal)
            publisher = make_publisher(
                config.rollout,
                endpoints,
                device_backend=engine.device.backend,
                scratch_dir=files.weights,
                model_path=config.model.path,
            )
        else:
            source = RowFeed(config, tokenizer, stop)
        if state.source:
            source.load_state_dict(state.source)
        reporter = Reporter(config, files.root, total_steps=config.run.steps, start_step=state.steps)
        pulse = Pulse(files.progress, state.steps, config.run.steps)
    return Session(
        config,
        engine,
        files,
        source=source,
        publisher=publisher,
        reporter=reporter,
        keeping=Keeping(
            config,
            engine,
            files,
            journal,
            saved=state.steps,
            on_problem=recorder(files.problems, "checkpoint", engine.parallel.rank),
        ),
        pulse=pulse,
        state=state,
        bound=saved_values(config, model_shape(engine)),
    )


def restore(config: Config, engine: Engine, files: RunFiles, at_most: int | None = None) -> RunState:
    """Load the newest good checkpoint, if there is one; collective.

    With `at_most`, the newest after so many steps, and nothing is renamed. Raises UserError when checkpoints
    are there but none is good, or when the config differs from the one it was saved with in what binds a run.
    """
    if config.resume.mode == "never":
        return RunState()
    parallel = engine.parallel
    on_problem = recorder(files.problems, "checkpoint", parallel.rank)
    found, problems = newest_good(
        files.checkpoints, parallel, on_problem, at_most=at_most, move=at_most is None
    )
    if found is None:
        if problems or damaged(files.checkpoints):  # starting at step 0 would hide the loss
            none_good = f"no checkpoint in {files.checkpoints} is good; take one from a backup, or move the "
            raise UserError("\n".join([*problems, none_good + "directory away to start from the beginning"]))
        return RunState()
    state = RunState.from_json(found.run_state, found.path.name)
    check_same(config, model_shape(engine), state.bound, found.path.name)
    engine.load(found.path)
    return state


def model_shape(engine: Engine) -> dict[str, Any]:
    """What must be equal in the model that a checkpoint is resumed with."""
    return {key: value for key, value in dataclasses.asdict(engine.hf).items() if key != "raw"}


def open_journal(config: Config, files: RunFiles) -> Journal | None:
    """The run's journal, on rank 0; None where it keeps none."""
    if not config.checkpoint.journal:
        return None
    on_problem = recorder(files.problems, "journal", rank=0)
    return Journal(files.journal, binding_values(config), on_problem)
