"""Every rule that a configuration breaks, except those that depend on the machine that would run it."""

from __future__ import annotations

from megatron_stare.config.checks import find_model_problems
from megatron_stare.config.schema import Config
from megatron_stare.plan.hardware import Hardware
from megatron_stare.plan.memory import StageMemory
from megatron_stare.plan.serving import Serving
from megatron_stare.weights.hf_config import HFConfig


def broken_rules(config: Config, hf: HFConfig, world_size: int) -> list[str]:
    """What `train` would refuse whatever the machine: layout, model, batch, objective. One line each."""
    return find_model_problems(config, world_size, hf)


def memory_problems(
    config: Config, stages: list[StageMemory], served: Serving | None, hardware: Hardware
) -> list[str]:
    """What does not fit, one line each."""
    problems = []
    room = hardware.memory - hardware.reserve
    worst = max(stages, key=lambda stage: stage.total)
    if worst.total > room:
        problems.append(
            f"memory: a rank of stage {worst.stage} needs {worst.total / 1e9:.1f} GB, and "
            f"{room / 1e9:.1f} GB are free; see --search"
        )
    rollout = config.rollout
    if served and served.kv_tokens < rollout.context_length:
        problems.append(
            f"rollout.memory_fraction={rollout.memory_fraction}: beside {served.weights_a_gpu / 1e9:.1f} GB "
            f"of weights a GPU there is room for {served.kv_tokens} cached tokens, less than "
            f"rollout.context_length={rollout.context_length}; raise rollout.tp"
        )
    return problems
