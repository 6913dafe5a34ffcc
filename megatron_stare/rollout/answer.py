"""From SGLang's answer to responses, refusing near the source what training could not use."""

from __future__ import annotations

import math
from typing import Any

from megatron_stare.rollout.endpoints import RolloutError
from megatron_stare.tasks.sample import Response

UNKNOWN_VERSION = -1
_RESTART = "publish the weights again, or restart the servers"


class WeightVersionError(RolloutError):
    """A response was written by other weights than the ones it was asked of."""


class AbortedError(RolloutError):
    """The server gave a response up, as one that is dying or updated does."""


def responses_from(
    answer: Any, n: int, *, prompt_index: int, vocab_size: int, weight_version: int | None
) -> list[Response]:
    """The `n` responses in an answer of /generate.

    Token ids and log-probs come from the same triples, so they cannot be out of step.
    `Response.text` is left empty: the server knows no tokenizer.

    Raises:
        WeightVersionError: `weight_version` is given and any token was written by another.
        AbortedError: a response was aborted.
        RolloutError: not n responses, missing or non-finite log-probs, an unknown token id.
    """
    where = f"prompt {prompt_index}"
    items = answer if isinstance(answer, list) else [answer]
    if len(items) != n:
        raise RolloutError(f"{where}: {len(items)} responses came back instead of {n}: {str(answer)[:300]}")
    return [_response(item, where, vocab_size, weight_version) for item in items]


def _response(item: Any, where: str, vocab_size: int, weight_version: int | None) -> Response:
    try:
        meta = item["meta_info"]
        reason = meta["finish_reason"] or {}
        triples = meta.get("output_token_logprobs") or []
        count = meta["completion_tokens"]
    except (KeyError, TypeError) as error:
        raise RolloutError(f"{where}: not an answer of /generate: {str(item)[:300]}") from error
    kind = reason.get("type")
    if kind == "abort":
        message = reason.get("message") or "no reason given"
        raise AbortedError(f"{where}: the server aborted a response ({message})")
    if kind not in ("stop", "length"):
        raise RolloutError(f"{where}: unknown finish reason {reason}")
    if not triples or len(triples) != count:
        raise RolloutError(f"{where}: {len(triples)} log-probs for {count} tokens; training needs one each")
    log_probs = [triple[0] for triple in triples]
    token_ids = [triple[1] for triple in triples]
    for log_prob, token in zip(log_probs, token_ids, strict=True):
        if log_prob is None or not math.isfinite(log_prob):
            raise RolloutError(
                f"{where}: log-prob {log_prob} for token {token}; the served weights are not sound, or the "
                f"server does not return log-probs"
            )
        if not 0 <= token < vocab_size:
            raise RolloutError(
                f"{where}: sampled token {token} is outside the vocabulary of {vocab_size}: "
                "the served model is not the one in the config"
            )
    version = _version(meta, where, weight_version)
    return Response(token_ids, log_probs, kind, version)


def _version(meta: dict[str, Any], where: str, wanted: int | None) -> int:
    """The version of the response's last token; all of its versions are compared with `wanted`."""
    spans = [span.get("version") for span in meta.get("weight_versions") or []]
    found = [as_version(version) for version in [*spans, meta.get("weight_version")]]
    if wanted is not None and any(version != wanted for version in found):
        writers = " then ".join(map(str, dict.fromkeys(spans or [meta.get("weight_version")])))
        raise WeightVersionError(
            f"{where}: a response was written by weights {writers}, "
            f"not by version {wanted}: a server missed an update, or was updated by another run; {_RESTART}"
        )
    return found[-1]


def as_version(version: Any) -> int:
    """SGLang's version string as a number; UNKNOWN_VERSION for what no publisher of ours wrote."""
    try:
        return int(version)
    except (TypeError, ValueError):
        return UNKNOWN_VERSION
