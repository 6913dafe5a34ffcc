"""Megatron distributed checkpoints: any layout saves, any other loads.

A checkpoint is a directory `step_NNNNNNN` that appears complete or not at all: it is written under another
name and renamed when every rank is done. Beside Megatron's files lies `run_state.json`, what the run itself
needs to go on (see run/resume.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from megatron_stare.weights.mapping import unwrap
from megatron_stare.weights.save import copy_companions

_NAME = re.compile(r"step_(\d{7})")


def find_latest(directory: Path) -> tuple[int, Path] | None:
    """The newest complete checkpoint under `directory` as (finished steps, path)."""
    found = [
        (int(match[1]), path)
        for path in (directory.iterdir() if directory.is_dir() else [])
        if (match := _NAME.fullmatch(path.name)) and (path / "run_state.json").is_file()
    ]
    return max(found, default=None)


def save(
    directory: Path,
    step: int,
    models,
    optimizer,
    run_state: dict[str, Any],
    *,
    hf_dir: str | Path,
    keep_last: int,
) -> Path:
    """Write the checkpoint after `step` finished steps; collective over all ranks. Returns its path.

    config.json and tokenizer of `hf_dir` lie beside the weights, so that a checkpoint can be converted
    without anything else.
    """
    target = directory / f"step_{step:07d}"
    aside = directory / f"{target.name}.tmp"
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(models, optimizer, is_loading=False), str(aside))
    if dist.get_rank() == 0:
        copy_companions(Path(hf_dir), aside, None)
        with open(aside / "run_state.json", "w", encoding="utf-8") as file:
            json.dump(run_state, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        _prune(directory, keep_last)
    dist.barrier()
    return target


def read_run_state(path: Path) -> dict[str, Any]:
    """The run state of a checkpoint."""
    return json.loads((path / "run_state.json").read_text(encoding="utf-8"))


def load(path: Path, models, optimizer) -> None:
    """Load weights and optimizer in place; collective over all ranks."""
    _make_optimizer_state(optimizer)
    state = dist_checkpointing.load(_sharded_state(models, optimizer, is_loading=True), str(path))
    for key, model in _named(models):
        model.load_state_dict(state[key], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    _separate_steps(optimizer)


def load_weights(path: Path, models) -> None:
    """Load weights alone, in place, into any layout; collective over all ranks.

    The optimizer's part has another form with expert parallelism than without; the weights have one form.
    """
    state, _ = _model_state(models)
    loaded = dist_checkpointing.load(state, str(path))
    for key, model in _named(models):
        model.load_state_dict(loaded[key], strict=True)


def _named(models):
    several = len(models) > 1
    return [(f"model{i}" if several else "model", unwrap(model)) for i, model in enumerate(models)]


def _model_state(models) -> tuple[dict[str, Any], dict[str, Any]]:
    """The models' sharded state, and the metadata that it was made with."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
    }
    return {key: model.sharded_state_dict(metadata=metadata) for key, model in _named(models)}, metadata


def _sharded_state(models, optimizer, *, is_loading: bool) -> dict[str, Any]:
    state, metadata = _model_state(models)
    of_models = state if len(models) > 1 else state["model"]
    state["optimizer"] = optimizer.sharded_state_dict(
        dict(of_models), is_loading=is_loading, metadata=metadata
    )
    return state


def _torch_optimizers(optimizer):
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if type(part.optimizer).__module__.startswith("torch."):
            yield part


def _make_optimizer_state(optimizer) -> None:
    """Give torch's Adam its state before loading: Megatron's distributed optimizer loads into it."""
    for part in _torch_optimizers(optimizer):
        if getattr(part, "init_state_fn", None) and hasattr(part, "gbuf_ranges"):
            part.init_state_fn(part.optimizer, part.config)
            for group in part.optimizer.param_groups:
                for param in group["params"]:
                    part.optimizer.state[param].setdefault("step", torch.tensor(0.0))


def _separate_steps(optimizer) -> None:
    """After a load all parameters share one step tensor, which Adam would then advance once for each."""
    for part in _torch_optimizers(optimizer):
        for state in part.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()


def _prune(directory: Path, keep_last: int) -> None:
    names = sorted(path.name for path in directory.iterdir() if _NAME.fullmatch(path.name))
    for name in names[:-keep_last]:
        shutil.rmtree(directory / name, ignore_errors=True)
