"""What a run needs to go on, beside weights and optimizer, and what must not have changed."""

from __future__ import annotations

from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.engine import checkpoint
from megatron_stare.engine.engine import Engine
from megatron_stare.errors import UserError
from megatron_stare.run.files import RunFiles

# The optimizer's part of a checkpoint has another form under each of these.
_FIXED = {"parallel": ("distributed_optimizer",), "model": ("dtype",)}


def fixed_values(config: Config) -> dict[str, Any]:
    """The config values that a checkpoint depends on, by dotted key."""
    return {
        f"{section}.{key}": getattr(getattr(config, section), key)
        for section, keys in _FIXED.items()
        for key in keys
    }


def restore(config: Config, engine: Engine, files: RunFiles) -> dict[str, Any]:
    """Load the last checkpoint where `resume.mode` asks for it; the state to start from. Collective.

    Raises UserError when a value that the checkpoint depends on has changed.
    """
    found = checkpoint.find_latest(files.checkpoints) if config.resume.mode == "auto" else None
    if found is None:
        return {"steps": 0, "stare": None, "source": None}
    state = checkpoint.read_run_state(found[1])
    if "stare" not in state:
        raise UserError(f"{found[1]} was saved by an older version; start anew from an export")
    for key, value in fixed_values(config).items():
        if state["fixed"][key] != value:
            raise UserError(
                f"{key}={value} cannot resume {found[1].name}, saved with {key}={state['fixed'][key]}: "
                "the optimizer is stored in another form; keep the value, or start anew from an export"
            )
    engine.load(found[1])
    return state
