"""Layouts of the trainer that fit, best first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from pydantic import ValidationError

from megatron_stare.config.schema import Config, ParallelSection
from megatron_stare.plan.architecture import Architecture
from megatron_stare.plan.memory import dtype_bytes
from megatron_stare.plan.plan import Options, Plan, make_plan, trainer_world
from megatron_stare.plan.rules import broken_rules

_LONG = 8192  # tokens of a sequence from which splitting it is tried
_LARGEST_PP = 16


def search(
    config: Config,
    model: Architecture,
    options: Options,
    progress: Callable[[list[Config]], Iterator[Config]] = iter,
) -> list[Plan]:
    """Plans of all layouts that keep the rules and fit, by estimated time of a step.

    For each of tp, pp, cp and ep the least recomputation that fits is taken; sequence parallelism, the
    distributed optimizer and overlap are on. `progress` may wrap the list of candidates.
    """
    config, world = trainer_world(config, options.gpus)
    found = []
    for candidate in progress(list(_candidates(config, model, options, world))):
        for recompute in ("none", "selective", "full"):
            plan = make_plan(_with(candidate, recompute=recompute), model, _fixed(options), quick=True)
            if plan.fits:
                found.append(plan)
                break
            if plan.stages and plan.worst.static > options.hardware.memory - options.hardware.reserve:
                break  # no recomputation helps
    return sorted(found, key=lambda plan: plan.time.total)


def _fixed(options: Options) -> Options:
    """The same with the number of trainer ranks taken from the configuration."""
    return Options(options.hardware, None, options.mean_prompt, options.mean_response, options.layers)


def _candidates(config: Config, model: Architecture, options: Options, world: int) -> Iterator[Config]:
    longest = config.task.max_prompt_tokens + config.rollout.max_response_tokens
    sizes = _powers(options.hardware.gpus_per_node)
    experts = sizes if model.hf.num_experts else [1]
    contexts = [cp for cp in _powers(8) if cp == 1 or longest // cp >= _LONG // 2 and longest > _LONG]
    for tp, pp, cp, ep in itertools.product(sizes, _powers(_LARGEST_PP), contexts, experts):
        if world % (tp * pp * cp) or tp * pp * cp > world:
            continue
        layout = {
            "world_size": world,
            "tp": tp,
            "pp": pp,
            "vpp": None,
            "cp": cp,
            "ep": ep,
            "sequence_parallel": tp > 1,
            "distributed_optimizer": True,
            "overlap": True,
        }
        try:
            candidate = _with(config, **layout)
        except ValidationError:
            continue
        room = options.hardware.memory - options.hardware.reserve
        if not broken_rules(candidate, model.hf, world) and _least(candidate, model, world) < room:
            yield candidate


def _least(config: Config, model: Architecture, world: int) -> float:
    """Bytes below which no rank's weights, gradients and optimizer can be: not worth building if too many."""
    parallel, hf = config.parallel, model.hf
    experts = hf.num_layers * hf.num_experts * 3 * hf.hidden_size * hf.expert_ffn_size
    width = dtype_bytes(config)
    states = (12 if width == 2 else 8) * (1 - parallel.optimizer_offload)
    a_stage = world // parallel.pp
    # Float32 gradients; the states are shared by all ranks that hold the same parameters.
    dense = (model.parameters - experts) / (parallel.tp * parallel.pp)
    own = experts / (parallel.ep * parallel.pp)
    everywhere = (dense + own) * (width + 4)
    return 0.9 * (everywhere + states * (dense * parallel.tp / a_stage + own * parallel.ep / a_stage))


def _with(config: Config, **changes) -> Config:
    parallel = ParallelSection.model_validate({**config.parallel.model_dump(), **changes})
    return config.model_copy(update={"parallel": parallel})


def _powers(largest: int) -> list[int]:
    return [2**i for i in range(largest.bit_length())]
