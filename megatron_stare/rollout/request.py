"""What is sent to /generate, checked before it is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from megatron_stare.config.schema import RolloutSection
from megatron_stare.errors import UserError
from megatron_stare.tasks.sample import Prompt

# From here on a prompt is read once and its cache shared; below, n copies at once are faster.
SHARED_PROMPT_TOKENS = 128


def check_prompt(prompt: Prompt, rollout: RolloutSection, vocab_size: int) -> None:
    """Raise UserError for a prompt that is empty, too long, or has an id outside the vocabulary."""
    ids = prompt.token_ids
    if not ids:
        raise UserError(f"prompt {prompt.index} has no token")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise UserError(
            f"prompt {prompt.index} has token id {outside}, outside the vocabulary of "
            f"{vocab_size}: tokenizer and model do not belong together"
        )
    room = rollout.context_length - rollout.max_response_tokens
    if len(ids) > room:
        raise UserError(
            f"prompt {prompt.index} has {len(ids)} tokens; "
            f"rollout.context_length={rollout.context_length} - "
            f"rollout.max_response_tokens={rollout.max_response_tokens} leaves room for {room}"
        )


def request_body(
    prompt: Prompt,
    n: int,
    *,
    temperature: float,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
    seed: int | None = None,
) -> dict[str, Any]:
    """The request for `n` responses to `prompt`; with a seed, each response has one of its own."""
    sampling: dict[str, Any] = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    if stop_token_ids:
        sampling["stop_token_ids"] = list(stop_token_ids)
    body: dict[str, Any] = {"return_logprob": True, "sampling_params": sampling}
    if seed is None and len(prompt.token_ids) >= SHARED_PROMPT_TOKENS:
        sampling["n"] = n
        return body | {"input_ids": prompt.token_ids}
    if seed is not None:
        seeds = [seed_named(seed, prompt.index, number) for number in range(n)]
        body["sampling_params"] = [sampling | {"sampling_seed": own} for own in seeds]
    return body | {"input_ids": [prompt.token_ids] * n}


def is_seeded(body: dict[str, Any]) -> bool:
    """Whether the responses have seeds of their own; sglang-router 0.3.2 refuses such a request."""
    return isinstance(body["sampling_params"], list)


def seed_named(*words: str | int) -> int:
    """62 bits that differ for all words and are the same wherever and whenever they are asked for."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2
