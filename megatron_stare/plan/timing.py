"""How long a step takes, by arithmetic over what it computes, reads and sends. Every rate is assumed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.config.schema import Config
from megatron_stare.plan.architecture import Architecture
from megatron_stare.plan.hardware import Hardware
from megatron_stare.plan.rank import Rank
from megatron_stare.plan.serving import Serving
from megatron_stare.plan.workload import Workload


@dataclass(frozen=True)
class StepTime:
    """Seconds of the parts of a step, one after the other."""

    rollout: float
    measure: float
    learn: float
    communication: float
    sync: float

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.rollout + self.measure + self.learn + self.communication + self.sync


def traffic(config: Config, ranks: list[Rank], work: Workload) -> dict[str, float]:
    """Bytes that the busiest rank sends in a step, by kind; collectives counted as rings send them."""
    share = work.mean_microbatch_tokens / work.microbatch_tokens
    rounds = work.microbatches * work.updates
    sums: dict[str, float] = {}
    for rank in ranks:
        sent = {name: size * work.updates for name, size in rank.update_sent.items()}
        for run in rank.passes:
            for name, size in run.sent.items():
                measured = run.sent_forward.get(name, 0.0) if config.objective == "rl" else 0.0
                sent[name] = sent.get(name, 0.0) + (size + measured) * rounds * share
            if config.parallel.pp > 1:
                passes = 3 if config.objective == "rl" else 2  # measure, and forward and backward of learn
                largest = max(r.output for r in ranks[0].passes)
                sent["PP"] = sent.get("PP", 0.0) + largest * rounds * share * passes
        for name, size in sent.items():
            sums[name] = max(sums.get(name, 0.0), size)
    return {name: size for name, size in sums.items() if size}


def step_time(
    config: Config,
    model: Architecture,
    ranks: list[Rank],
    sent: dict[str, float],
    served: Serving | None,
    hardware: Hardware,
    work: Workload,
    world_size: int,
) -> StepTime:
    """The estimate for `world_size` trainer ranks."""
    forward = work.tokens * flops_per_token(model, work)
    rate = world_size * hardware.flops * hardware.train_efficiency
    parallel = config.parallel
    bubble = 1 + (parallel.pp - 1) / (work.microbatches * (parallel.vpp or 1))
    passes = 4 if parallel.recompute == "full" else 3
    return StepTime(
        rollout=_rollout_seconds(config, model, served, hardware, work) if served else 0.0,
        measure=forward / rate * bubble if served else 0.0,
        learn=passes * forward / rate * bubble,
        communication=sum(
            _link_seconds(name, size, ranks, hardware, parallel.overlap) for name, size in sent.items()
        ),
        sync=served.sync_seconds if served else 0.0,
    )


def flops_per_token(model: Architecture, work: Workload) -> float:
    """Floating-point operations of a forward pass: products with weights, and causal attention."""
    hf, length = model.hf, work.prompt_tokens + work.response_tokens
    return 2 * model.active_parameters + 2 * hf.num_layers * hf.attention_size * length


def _link_seconds(name: str, size: float, ranks: list[Rank], hardware: Hardware, overlap: bool) -> float:
    span = max(rank.spans.get(name.split()[0], 1) for rank in ranks)
    rate = hardware.nvlink if span <= hardware.gpus_per_node else hardware.network
    exposed = 1 - hardware.overlap if overlap and name == "DP gradients" else 1.0
    return exposed * size / (rate * hardware.link_efficiency)


def _rollout_seconds(
    config: Config, model: Architecture, served: Serving, hardware: Hardware, work: Workload
) -> float:
    """Decoding, bound by reading weights and cache, or by the products; as long as the longest response."""
    rollout = config.rollout
    if not served.concurrent:
        return float("inf")
    responses = -(-work.responses // served.servers)
    context = work.prompt_tokens + work.response_tokens / 2
    # Of experts all are read once many responses are under way.
    read = served.weights_a_gpu + served.kv_bytes_a_token * context * served.concurrent / rollout.tp
    products = served.concurrent * flops_per_token(model, work) / (rollout.tp * hardware.flops)
    a_step = max(read / hardware.hbm, products) / hardware.decode_efficiency
    waves = responses / served.concurrent
    steps = max(rollout.max_response_tokens, waves * work.response_tokens)
    prefill = work.responses / config.batch.responses_per_prompt * work.prompt_tokens
    rate = served.gpus * hardware.flops * hardware.train_efficiency
    return steps * a_step + prefill * flops_per_token(model, work) / rate
