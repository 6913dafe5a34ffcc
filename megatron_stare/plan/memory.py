"""From what a rank was seen to hold to the most memory that each pipeline stage needs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.config.schema import Config
from megatron_stare.plan.rank import Rank
from megatron_stare.plan.workload import Workload
from megatron_stare.weights.hf_config import HFConfig
from megatron_stare.weights.mapping import model_entries

_EXPORT_IN_FLIGHT = 64 << 20  # as weights/export.py bounds it
_WIDTH = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of one pipeline stage.

    `activations` are those of all microbatches in flight at the worst moment, with the gradients that the
    backward pass makes on its way; `log_prob` is the part of the log-prob function in them. `buffers`: what
    is received from a neighbour stage. `export`: what gathering weights for servers takes on the first rank,
    at a time when there are no activations. `reference`: the model of the KL penalty.
    """

    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    log_prob: int
    in_flight: int
    buffers: int
    export: int
    reference: int

    @property
    def static(self) -> int:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> int:
        """The most at any moment, without the reserve."""
        return self.static + max(self.activations + self.buffers, self.export)


def stage_memory(rank: Rank, stage: int, config: Config, hf: HFConfig, work: Workload) -> StageMemory:
    """Memory of pipeline stage `stage`, of which `rank` is one (or is alike, for stages in the middle)."""
    parallel = config.parallel
    in_flight = passes_in_flight(stage, parallel.pp, parallel.vpp or 1, work.microbatches)
    held = sum(p.held for p in rank.passes) / len(rank.passes)
    peak = max(p.peak for p in rank.passes)
    received = max(p.output for p in rank.passes) if parallel.pp > 1 else 0
    rl = config.objective == "rl"
    return StageMemory(
        stage=stage,
        parameters=rank.parameters,
        weights=rank.weights,
        gradients=rank.gradients,
        optimizer=int(rank.optimizer * (1 - parallel.optimizer_offload)),
        activations=int((in_flight - 1) * held + peak),
        log_prob=rank.log_prob,
        in_flight=in_flight,
        buffers=int(received),
        export=export_bytes(config, hf) if rl and stage == 0 else 0,
        reference=rank.weights if rl and config.algorithm.kl_coef > 0 else 0,
    )


def passes_in_flight(stage: int, pp: int, vpp: int, microbatches: int) -> int:
    """Forward passes (of one virtual stage each) that wait for their backward pass at once, at most.

    Megatron's 1F1B schedule, and its interleaved one where vpp > 1.
    """
    if vpp == 1:
        return min(microbatches, pp - stage)
    return min(microbatches * vpp, (pp - stage - 1) * 2 + (vpp - 1) * pp + 1)


def export_bytes(config: Config, hf: HFConfig) -> int:
    """What bringing the largest parameter together on rank 0 and sending it takes."""
    width = _WIDTH[config.model.dtype]
    largest = 0
    for entry in model_entries(hf):
        if not entry.copy:
            elements = 0
            for _, shape in entry.hf_tensors:
                size = 1
                for length in shape:
                    size *= length
                elements += size
            largest = max(largest, elements * width)
    return 2 * largest + _EXPORT_IN_FLIGHT + config.rollout.bucket_mb * 2**20


def dtype_bytes(config: Config) -> int:
    """Bytes of a weight in `model.dtype`."""
    return _WIDTH[config.model.dtype]
