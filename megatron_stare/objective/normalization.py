"""What the sum over tokens is divided by: a multiplier for each token, and one number N for all.

    loss = (1/N) * sum over masked tokens of multiplier * token loss

Both parts are known from the lengths of the responses before any loss is computed, and N of a batch is
the sum of the N of its parts. So nothing is divided before it is complete, and neither microbatches nor
ranks change the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

NormalizationKind = Literal["token_mean", "sequence_mean", "dr_grpo"]


@dataclass(frozen=True)
class Normalization:
    """Of some sequences: a multiplier a token, and what they add to the global N."""

    multipliers: Tensor  # float32 [tokens], sequence after sequence
    normalizer: float  # to be summed over microbatches and ranks; may be 0 for a part, and then adds nothing


def normalization(
    kind: NormalizationKind, lengths: Sequence[int] | Tensor, max_response_length: int | None = None
) -> Normalization:
    """Multipliers and N of sequences with `lengths` response tokens.

    - "token_mean": every token weighs the same; N = tokens. DAPO (arXiv 2503.14476, section 3.3).
    - "sequence_mean": the mean over sequences of the mean over their tokens; each token weighs
      1 / (tokens of its sequence), N = sequences that have any. GRPO (arXiv 2402.03300, eq. 3), GSPO.
    - "dr_grpo": every token weighs the same; N = max_response_length * sequences, a constant, so that
      the length of a response does not scale its gradient. Dr. GRPO (arXiv 2503.20783, section 3.2).

    A sequence without response tokens has no multiplier; it counts in the constant of "dr_grpo" only.

    Args:
        lengths: response tokens of each sequence, at least 0; list or int64 [sequences] on any device.
        max_response_length: for "dr_grpo" only: the most tokens that a response may have.

    Raises:
        ValueError: as `normalizer`.
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    total = normalizer(kind, lengths.tolist(), max_response_length)
    return Normalization(token_multipliers(kind, lengths), total)


def normalizer(
    kind: NormalizationKind, lengths: Sequence[int], max_response_length: int | None = None
) -> float:
    """N of sequences with `lengths` response tokens, as `normalization` describes.

    Raises:
        ValueError: unknown kind, a negative length, or for "dr_grpo" no maximum or a longer response.
    """
    if lengths and min(lengths) < 0:
        raise ValueError(f"a response has {min(lengths)} tokens, below 0")
    match kind:
        case "token_mean":
            return float(sum(lengths))
        case "sequence_mean":
            return float(sum(length > 0 for length in lengths))
        case "dr_grpo":
            if max_response_length is None or max_response_length < 1:
                raise ValueError(f"dr_grpo needs max_response_length >= 1, not {max_response_length}")
            if lengths and max(lengths) > max_response_length:
                raise ValueError(
                    f"a response has {max(lengths)} tokens, above max_response_length={max_response_length}"
                )
            return float(max_response_length * len(lengths))
    raise ValueError(f"normalization {kind!r} is none of {', '.join(get_args(NormalizationKind))}")


def token_multipliers(kind: NormalizationKind, lengths: Tensor) -> Tensor:
    """float32 [sum of lengths]: the multiplier of each token, sequence after sequence; lengths int64."""
    each = lengths.float()
    each = each.reciprocal() if kind == "sequence_mean" else torch.ones_like(each)
    return each.repeat_interleave(lengths)
