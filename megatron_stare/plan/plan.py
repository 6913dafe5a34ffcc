"""A plan: all of it, for one configuration on one machine."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.plan.architecture import Architecture
from megatron_stare.plan.hardware import Hardware
from megatron_stare.plan.memory import StageMemory, stage_memory
from megatron_stare.plan.rules import broken_rules, memory_problems
from megatron_stare.plan.serving import Serving, serving
from megatron_stare.plan.timing import StepTime, step_time, traffic
from megatron_stare.plan.workload import Workload, workload


@dataclass(frozen=True)
class Options:
    """What a plan is made for, beside the configuration; `gpus` counts those of trainer and servers."""

    hardware: Hardware = Hardware()
    gpus: int | None = None
    mean_prompt: int | None = None
    mean_response: int | None = None
    layers: str | None = None


@dataclass(frozen=True)
class Plan:
    """The outcome. With broken rules nothing is measured: `stages` is empty, the rest None."""

    config: Config
    model: Architecture
    hardware: Hardware
    layers: str
    trainer_ranks: int
    work: Workload
    rules: list[str]
    stages: list[StageMemory]
    sent: dict[str, float] | None = None
    served: Serving | None = None
    time: StepTime | None = None
    problems: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether no rule is broken and everything has room."""
        return not self.rules and not self.problems

    @property
    def worst(self) -> StageMemory:
        """The stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def gpus(self) -> int:
        """GPUs of trainer and servers."""
        return self.trainer_ranks + (self.served.gpus if self.served else 0)

    def assumptions(self) -> list[str]:
        """What the figures rest on, one line each."""
        how = (
            "activations: the engine's model run on tensors without memory; in place of Transformer Engine's "
            "norms and flash attention, stand-ins that keep what theirs keep (no matrix of scores)"
            if self.layers == "transformer_engine"
            else "activations: the engine's model with local layers, run on tensors without memory"
        )
        special = ["experts get equally many tokens"] if self.model.hf.num_experts else []
        if share := self.config.parallel.optimizer_offload:
            special.append(f"{share:.0%} of the optimizer's state is on the host; its transfer takes no time")
        return [how, *special, *self.hardware.assumptions(), *self.work.assumptions()]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; bytes and seconds."""
        return {
            "model": {
                "source": self.model.source,
                "parameters": self.model.parameters,
                "active_parameters": self.model.active_parameters,
            },
            "gpus": self.gpus,
            "trainer_ranks": self.trainer_ranks,
            "layers": self.layers,
            "parallel": self.config.parallel.model_dump(mode="json"),
            "fits": self.fits,
            "rules": self.rules,
            "problems": list(self.problems),
            "hardware": asdict(self.hardware),
            "workload": {**asdict(self.work), "tokens": self.work.tokens},
            "stages": [{**asdict(s), "static": s.static, "total": s.total} for s in self.stages],
            "sent_bytes": self.sent,
            "serving": asdict(self.served) if self.served else None,
            "seconds": {**asdict(self.time), "total": self.time.total} if self.time else None,
            "assumptions": self.assumptions(),
        }


def make_plan(config: Config, model: Architecture, options: Options, *, quick: bool = False) -> Plan:
    """Plan `config`. Raises UserError when the servers leave no GPU for the trainer.

    `quick` takes the first stage for those in the middle, which need a little less than it.
    """
    # Imported late: the engine's packages take seconds, and mistakes in the command line need none of them.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron names every package that it does without
        from megatron_stare.plan.probe import probe_rank

    config, world = trainer_world(config, options.gpus)
    work = workload(config, world, options.mean_prompt, options.mean_response)
    layers = options.layers or ("local" if config.model.layers == "local" else "transformer_engine")
    rules = broken_rules(config, model.hf, world)
    plan = Plan(config, model, options.hardware, layers, world, work, rules, [])
    if rules:
        return plan
    pp = config.parallel.pp
    middle = 0 if quick else min(1, pp - 1)  # stages in the middle are alike
    ranks = {
        stage: probe_rank(
            config,
            model.hf,
            world_size=world,
            rank=stage * (world // pp),
            layers=layers,
            lengths=work.lengths,
            quick=quick,
        )
        for stage in sorted({0, middle, pp - 1})
    }
    of_stage = [ranks.get(stage, ranks[middle]) for stage in range(pp)]
    stages = [stage_memory(rank, i, config, model.hf, work) for i, rank in enumerate(of_stage)]
    sent = traffic(config, of_stage, work)
    served = serving(config, model, options.hardware, work) if config.objective == "rl" else None
    seconds = step_time(config, model, of_stage, sent, served, options.hardware, work, world)
    problems = memory_problems(config, stages, served, options.hardware)
    return replace(plan, stages=stages, sent=sent, served=served, time=seconds, problems=tuple(problems))


def trainer_world(config: Config, gpus: int | None) -> tuple[Config, int]:
    """The configuration for `gpus` GPUs in all, and its trainer ranks.

    Without `gpus`: `parallel.world_size`, or one copy of the model. Servers that run elsewhere
    (`rollout.endpoints`) take none of them.
    """
    if gpus is None:
        return config, config.parallel.world_size or config.parallel.model_size
    rollout = config.rollout
    own = config.objective == "rl" and not rollout.endpoints
    served = rollout.servers * rollout.tp if own else 0
    if served >= gpus:
        raise UserError(
            f"--gpus={gpus}: rollout.servers={rollout.servers} x rollout.tp={rollout.tp} leave none for the "
            f"trainer; allowed: more than {served}"
        )
    parallel = config.parallel.model_copy(update={"world_size": gpus - served})
    return config.model_copy(update={"parallel": parallel}), gpus - served
