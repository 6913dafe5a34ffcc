"""What a step computes: responses, tokens, microbatches. Mean lengths are assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.config.schema import Config

# How full microbatches are on average; benchmarks.packing measures it.
_UTILISATION = 0.95


@dataclass(frozen=True)
class Workload:
    """A step's work. Tokens are of the whole run; microbatches those of one replica in one update."""

    responses: int
    prompt_tokens: int
    response_tokens: int
    updates: int
    replicas: int
    microbatches: int
    microbatch_tokens: int
    longest: int

    @property
    def tokens(self) -> int:
        """Tokens of a step that the trainer computes."""
        return self.responses * (self.prompt_tokens + self.response_tokens)

    @property
    def mean_microbatch_tokens(self) -> float:
        """Tokens of an average microbatch, over its context-parallel ranks."""
        return self.tokens / (self.updates * self.replicas * self.microbatches)

    @property
    def lengths(self) -> list[int]:
        """Sequences of the fullest microbatch: of the greatest length, and one that fills the rest."""
        whole, rest = divmod(self.microbatch_tokens, self.longest)
        return [self.longest] * whole + ([rest] if rest > 1 else [])

    def assumptions(self) -> list[str]:
        """The lengths that the step's time is estimated for."""
        return [
            f"a prompt has {self.prompt_tokens} tokens on average (--mean-prompt), a response "
            f"{self.response_tokens} (--mean-response); microbatches are {_UTILISATION:.0%} full",
        ]


def workload(
    config: Config, world_size: int, mean_prompt: int | None = None, mean_response: int | None = None
) -> Workload:
    """The work of one step. Without means: a quarter of the longest prompt, half of the longest response."""
    batch, parallel = config.batch, config.parallel
    rl = config.objective == "rl"
    replicas = max(1, world_size // parallel.model_size)
    prompt = mean_prompt or max(1, config.task.max_prompt_tokens // 4)
    response = mean_response or max(1, config.rollout.max_response_tokens // 2)
    responses = batch.prompts_per_step * (batch.responses_per_prompt if rl else 1)
    tokens = responses * (prompt + response) / (replicas * batch.updates_per_step)
    multiple = parallel.pp if parallel.vpp else 1
    microbatches = max(1, -(-int(tokens) // int(batch.max_tokens_per_microbatch * _UTILISATION)))
    longest = config.task.max_prompt_tokens + config.rollout.max_response_tokens
    return Workload(
        responses=responses,
        prompt_tokens=prompt,
        response_tokens=response,
        updates=batch.updates_per_step,
        replicas=replicas,
        microbatches=-(-microbatches // multiple) * multiple,
        microbatch_tokens=batch.max_tokens_per_microbatch,
        longest=min(longest, batch.max_tokens_per_microbatch),
    )
