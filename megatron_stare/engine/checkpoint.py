"""What a checkpoint holds, in Megatron's distributed form: any layout saves, any other loads.

How one is written and published is told in saving.py and publication.py.
"""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_stare.errors import UserError
from megatron_stare.weights.mapping import unwrap
from megatron_stare.weights.publication import RUN_STATE


def request_save(state: dict[str, Any], directory: Path):
    """Megatron's request to write `state` into the empty `directory`, for staging.py; collective."""
    # Writers answer through this queue. Megatron's own is served by a further process for each rank.
    filesystem_async._results_queue = queue.Queue()
    _detach_from_buffers(state)
    return dist_checkpointing.save(state, str(directory), async_sharded_save=True)


def _detach_from_buffers(state: dict[str, Any]) -> None:
    """Give views of Megatron's buffers storages of their own, over the same memory.

    Its planner clones each tensor in host memory whose storage holds more than the tensor, while training
    waits.
    """
    apply_factories(state)  # which makes further views, of fused matrices; `save` would do it as well
    for value in nested_values(state):
        data = getattr(value, "data", None)
        if torch.is_tensor(data) and data.is_cpu and data.is_contiguous() and data.dim():
            memory = data.detach().flatten().view(torch.uint8).numpy()
            value.data = torch.from_numpy(memory).view(data.dtype).view(data.shape)


def read_run_state(path: Path) -> dict[str, Any]:
    """What the run itself needs to go on (see run/state.py), of a checkpoint.

    Raises UserError where it is no JSON object.
    """
    try:
        found = json.loads((path / RUN_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path / RUN_STATE} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path / RUN_STATE} is no JSON object")
    return found


def load(path: Path, models, optimizer) -> None:
    """Load weights and optimizer in place; collective over all ranks."""
    _make_optimizer_state(optimizer)
    state = dist_checkpointing.load(sharded_state(models, optimizer, is_loading=True), str(path))
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


def sharded_state(models, optimizer, *, is_loading: bool) -> dict[str, Any]:
    """Models and optimizer, each tensor with its place in the whole."""
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
