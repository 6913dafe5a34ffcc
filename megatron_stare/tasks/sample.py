"""What a task gives, what a policy answers, and what the answer was worth.

These three classes are the only form in which samples travel between tasks,
rollout and trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass
class Prompt:
    """One row of a task, ready to be sent to a sampler.

    Attributes:
        index: row number in the source, from 0; it names the same row in every epoch and after a resume.
        token_ids: what the model reads, after the chat template.
        text: what was tokenised.
        answer: the ground truth, passed to the reward unchanged. In supervised training: what to learn.
        data_source: where the row comes from, for rewards and metrics that tell sources apart.
        extra: the row's other columns. Procedural tasks keep their whole entry here for their own scorer.
    """

    index: int
    token_ids: list[int]
    text: str
    answer: Any
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Response:
    """One sampled continuation of a prompt.

    Attributes:
        token_ids: exactly as sampled, with the end-of-sequence token if that was sampled. Never text encoded
            again.
        log_probs: the sampler's log-probability of each token, at the sampling temperature, in nats.
        finish_reason: "stop" (ended by itself), "length" (cut off) or "abort".
        weight_version: version of the weights that wrote it.
        text: decoded without special tokens; only rewards read it.
        reward: 0.0 until scored, and where scoring failed.
        reward_error: why scoring failed; None if it did not.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int
    text: str = ""
    reward: float = 0.0
    reward_error: str | None = None


@dataclass
class Group:
    """A prompt and the responses that are compared with one another."""

    prompt: Prompt
    responses: list[Response]
