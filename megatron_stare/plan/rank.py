"""What is known of one rank of a run, as `probe.py` finds it. Sizes are in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass of one microbatch through a rank's layers (one virtual stage), in bytes.

    `saved` is what autograd keeps for the backward pass, `held` all that is alive between the two passes,
    `peak` the most that is alive at any moment, `output` what is handed to the next stage; `sent` what this
    rank sends in both passes by kind of parallelism, `sent_forward` its part of the forward pass.
    """

    saved: float
    held: float
    peak: float
    output: float
    sent: dict[str, float] = field(default_factory=dict)
    sent_forward: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rank:
    """What a rank holds all the time, in bytes; its passes, one a virtual stage; what an update sends.

    `log_prob` is the most that the log-prob function alone makes at once (part of the passes' peak).
    """

    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    passes: list[Pass]
    log_prob: int
    update_sent: dict[str, float]
    spans: dict[str, int]  # by kind: how many global ranks lie between the first and the last of the group
