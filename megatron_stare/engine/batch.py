"""From responses to packed microbatches: sequences laid end to end, as the model takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_stare.engine.attention import PackedSequences
from megatron_stare.engine.context import WHOLE, Context, OwnTokens
from megatron_stare.objective import global_token_ids


@dataclass
class TrainSequence:
    """A prompt and one response, as the trainer needs them.

    `token_ids` holds the whole sequence; `response_mask` (bool, alike in length) marks the tokens that the
    policy wrote. `sampler_log_probs` has one number for each marked token. `number` is the sequence's place
    in the step, the same however the step is shared out.
    """

    token_ids: np.ndarray
    response_mask: np.ndarray
    advantage: float = 0.0
    sampler_log_probs: np.ndarray | None = None
    number: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def response_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return int(self.response_mask.sum())


@dataclass
class Microbatch:
    """This rank's part of sequences laid end to end; T tokens including padding, N response tokens.

    `tokens`, `positions`, `labels` (int64 [1, T]), `loss_mask` (bool [1, T], position t predicts a response
    token at t + 1) and `padding` (bool [1, T]) go to the model; `advantages` and `sampler_log_probs` (float32
    [N]) to the objective, in the order in which the model returns its response tokens. So are, of each
    response token, `sequence_of` (int64 [N]), its sequence in this microbatch, and `token_numbers` (int64
    [N]), an id that is the token's own in the whole step. `sequence_tokens` (int64, one for each sequence)
    counts the response tokens of whole sequences, and `own` says which of those are here: all, without
    context parallelism.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    padding: torch.Tensor
    packed: PackedSequences
    advantages: torch.Tensor
    sampler_log_probs: torch.Tensor
    sequence_of: torch.Tensor
    token_numbers: torch.Tensor
    sequence_tokens: torch.Tensor
    own: OwnTokens

    @property
    def length(self) -> int:
        """T, the tokens including padding."""
        return self.tokens.shape[1]

    @property
    def response_tokens(self) -> int:
        """N, the tokens that count in the objective."""
        return self.advantages.shape[0]


def packed_length(sequences: list[TrainSequence], context: Context = WHOLE) -> int:
    """Tokens that the sequences take together, over all context-parallel ranks."""
    return sum(context.padded(len(sequence)) for sequence in sequences)


def pack(
    sequences: list[TrainSequence], length: int, device: torch.device, context: Context = WHOLE
) -> Microbatch:
    """Lay sequences end to end and pad to `length`, of which this rank takes its part of `context`.

    Padding is a sequence of its own, never in the mask; so are the tokens that fill a sequence up to what
    context parallelism divides, which under a causal mask no token before them sees.
    """
    tokens = np.zeros(length, dtype=np.int64)
    labels = np.zeros(length, dtype=np.int64)
    positions = np.zeros(length, dtype=np.int64)
    mask = np.zeros(length, dtype=bool)
    padding = np.ones(length, dtype=bool)
    lengths, start = [], 0
    for sequence in sequences:
        end = start + len(sequence)
        tokens[start:end] = sequence.token_ids
        # Shifted within the sequence and before it is split, so no label crosses a boundary.
        labels[start : end - 1] = sequence.token_ids[1:]
        mask[start : end - 1] = sequence.response_mask[1:]
        padding[start:end] = False
        lengths.append(context.padded(len(sequence)))
        positions[start : start + lengths[-1]] = np.arange(lengths[-1])
        start += lengths[-1]
    positions[start:] = np.arange(length - start)
    if start < length:
        lengths.append(length - start)
    rows = context.own_rows(lengths)
    own = (np.cumsum(mask) - 1)[rows[mask[rows]]]  # of each response token here, its place among all
    counts = [int(sequence.response_mask[1:].sum()) for sequence in sequences]
    sampler = [
        s.sampler_log_probs if s.sampler_log_probs is not None else np.zeros(n, dtype=np.float32)
        for s, n in zip(sequences, counts, strict=True)
    ]
    advantages = np.repeat(np.array([s.advantage for s in sequences], dtype=np.float32), counts)
    numbers = global_token_ids([s.number for s in sequences], counts).numpy()

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Microbatch(
        tokens=put(tokens[rows])[None],
        positions=put(positions[rows])[None],
        labels=put(labels[rows])[None],
        loss_mask=put(mask[rows])[None],
        padding=put(padding[rows])[None],
        packed=PackedSequences.of_lengths(lengths, device, context),
        advantages=put(advantages[own]),
        sampler_log_probs=put(np.concatenate([np.zeros(0), *sampler]).astype(np.float32)[own]),
        sequence_of=put(np.repeat(np.arange(len(sequences)), counts)[own]),
        token_numbers=put(numbers[own]),
        sequence_tokens=put(np.array(counts, dtype=np.int64)),
        own=OwnTokens(context, put(own), sum(counts)),
    )


def pack_update(
    microbatches: list[list[TrainSequence]],
    *,
    common_length: int | None,
    multiple: int,
    device: torch.device,
    context: Context = WHOLE,
) -> list[Microbatch]:
    """Pack one replica's microbatches; `common_length` makes all alike, as pipeline stages exchange them.

    Lengths are those over all context-parallel ranks, rounded up to `multiple`.
    """

    def rounded(tokens: int) -> int:
        return max(1, -(-tokens // multiple)) * multiple

    return [
        pack(chosen, rounded(common_length or packed_length(chosen, context)), device, context)
        for chosen in microbatches
    ]
