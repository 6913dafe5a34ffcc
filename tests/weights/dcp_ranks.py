"""What each rank of the distributed checkpoint tests does: Megatron saves, and loads what was converted."""

from __future__ import annotations

from pathlib import Path

import torch

import megatron_stare.engine  # noqa: F401  prepares the device before Megatron is imported

# isort: split
from megatron.core import dist_checkpointing, parallel_state

from benchmarks.parity_ranks import make_engine
from megatron_stare.engine.device import current
from megatron_stare.engine.model import build_models, transformer_config
from megatron_stare.engine.parallel import initialize, leave_model_parallel
from megatron_stare.weights import global_parameters, load_hf_weights, read_hf_config
from megatron_stare.weights.save import save_hf
from tests.distributed.checkpointing import save, update


def save_and_load(
    checkpoints: dict[str, str], converted: dict[str, str], layouts: dict[str, dict], saved: str, save: str
) -> dict[str, list[str]]:
    """Save the originals in layout `save`, load the converted ones into all layouts; see below."""
    if save == "tp2":
        save_training(checkpoints, saved)
    save_all(checkpoints, {save: layouts[save]}, saved)
    return load_all(checkpoints, converted, layouts)


def save_training(checkpoints: dict[str, str], directory: str) -> None:
    """Train for one update at TP 2 and save as a run does, as step 7; beside it what the run would export."""
    for name, path in checkpoints.items():
        dtype = read_hf_config(path).raw["dtype"]
        layout = {"parallel.tp": 2, "parallel.sequence_parallel": True}
        engine = make_engine(path, **layout, **{"model.dtype": dtype})
        update(engine, seed=0)
        save_hf(Path(directory) / name / "exported", engine.exporter, path)
        save(engine, Path(directory) / name / "run" / "checkpoints", 7, {"steps": 7})
        leave_model_parallel()


def save_all(checkpoints: dict[str, str], layouts: dict[str, dict], directory: str) -> None:
    """Save each Hugging Face checkpoint in each layout under DIRECTORY/NAME/LAYOUT, by Megatron itself."""
    for layout, sizes in layouts.items():
        parallel = initialize(current(), **sizes, timeout_minutes=2)
        for name, path in checkpoints.items():
            models = _build(path, parallel)
            _load_hf(models, path, parallel)
            target = Path(directory) / name / layout
            target.mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(_sharded(models), str(target))
        leave_model_parallel()


def load_all(checkpoints: dict[str, str], converted: dict[str, str], layouts: dict[str, dict]) -> dict:
    """Load each converted checkpoint into each layout; the parameters that differ from the original's."""
    different = {}
    for layout, sizes in layouts.items():
        parallel = initialize(current(), **sizes, timeout_minutes=2)
        for name, path in converted.items():
            models, reference = _build(path, parallel), _build(path, parallel)
            _load_hf(reference, checkpoints[name], parallel)
            state = dist_checkpointing.load(_sharded(models), path)
            for i, model in enumerate(models):
                model.load_state_dict(state[f"model{i}"], strict=True)
            expected = global_parameters(reference)
            found = global_parameters(models)
            assert found.keys() == expected.keys()
            different[f"{name}/{layout}"] = [k for k, p in found.items() if not torch.equal(p, expected[k])]
        leave_model_parallel()
    return different


def _build(path: str, parallel) -> list[torch.nn.Module]:
    hf = read_hf_config(path)
    config = transformer_config(hf, parallel, current(), dtype=getattr(torch, hf.raw["dtype"]))
    models = build_models(hf, config, parallel, current(), layers="local")
    for model in models:
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
    return models


def _load_hf(models, path: str, parallel) -> None:
    load_hf_weights(models, path, read_hf_config(path), tp_rank=parallel.tp_rank, tp_size=parallel.tp_size)


def _sharded(models) -> dict:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    return {f"model{i}": model.sharded_state_dict(metadata=metadata) for i, model in enumerate(models)}
