"""Puts a rank's session together, fresh or from the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from megatron_stare.config.schema import Config
from megatron_stare.engine.engine import Engine
from megatron_stare.report import Reporter
from megatron_stare.rollout import Endpoints, RolloutClient, make_publisher
from megatron_stare.run.files import RunFiles
from megatron_stare.resume.mode import restore
from megatron_stare.run.sampling import Sampler
from megatron_stare.run.session import Session
from megatron_stare.run.supervised import RowFeed
from megatron_stare.tasks import load_tokenizer


def build_session(config: Config, engine: Engine, files: RunFiles, stop: Callable[[], bool]) -> Session:
    """The session of this rank; collective where a checkpoint is loaded."""
    state = restore(config, engine, files)
    source = publisher = reporter = None
    if engine.parallel.rank == 0:
        tokenizer = load_tokenizer(config.model.path)
        if config.objective == "rl":
            endpoints = Endpoints.from_env()
            client = RolloutClient(endpoints, config.rollout, vocab_size=engine.hf.vocab_size)
            source = Sampler(config, tokenizer, client, stop, files.logs / "rewards.log")
            publisher = make_publisher(
                config.rollout,
                endpoints,
                device_backend=engine.device.backend,
                scratch_dir=files.weights,
                model_path=config.model.path,
            )
        else:
            source = RowFeed(config, tokenizer, stop)
        if state["source"]:
            source.load_state_dict(state["source"])
        reporter = Reporter(config, files.root, total_steps=config.run.steps, start_step=state["steps"])
    return Session(
        config,
        engine,
        files,
        source=source,
        publisher=publisher,
        reporter=reporter,
        first_step=state["steps"],
        stare_state=state["stare"],
    )
