"""From responses to packed microbatches: sequences laid end to end, as the model takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_stare.engine.attention import PackedSequences
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
    """Sequences laid end to end; T tokens including padding, N response tokens.

    `tokens`, `positions`, `labels` (int64 [1, T]) and `loss_mask` (bool [1, T], position t predicts a
    response token at t + 1) go to the model; `advantages` and `sampler_log_probs` (float32 [N]) to the
    objective, in the order in which the model returns its response tokens. So are, of each response token,
    `sequence_of` (int64 [N]), its sequence in this microbatch, and `token_numbers` (int64 [N]), an id that is
    the token's own in the whole step.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    packed: PackedSequences
    advantages: torch.Tensor
    sampler_log_probs: torch.Tensor
    sequence_of: torch.Tensor
    token_numbers: torch.Tensor

    @property
    def length(self) -> int:
        """T, the tokens including padding."""
        return self.tokens.shape[1]

    @property
    def response_tokens(self) -> int:
        """N, the tokens that count in the objective."""
        return self.advantages.shape[0]


def pack(sequences: list[TrainSequence], length: int, device: torch.device) -> Microbatch:
    """Lay sequences end to end and pad to `length`; padding is a sequence of its own, never in the mask."""
    tokens = np.zeros(length, dtype=np.int64)
    labels = np.zeros(length, dtype=np.int64)
    positions = np.zeros(length, dtype=np.int64)
    mask = np.zeros(length, dtype=bool)
    start = 0
    for sequence in sequences:
        end = start + len(sequence)
        tokens[start:end] = sequence.token_ids
        positions[start:end] = np.arange(len(sequence))
        # Shifted within the sequence and before any split of it, so no label crosses a boundary.
        labels[start : end - 1] = sequence.token_ids[1:]
        mask[start : end - 1] = sequence.response_mask[1:]
        start = end
    positions[start:] = np.arange(length - start)
    lengths = [len(sequence) for sequence in sequences] + ([length - start] if start < length else [])
    counts = [int(sequence.response_mask[1:].sum()) for sequence in sequences]
    sampler = [
        s.sampler_log_probs if s.sampler_log_probs is not None else np.zeros(n, dtype=np.float32)
        for s, n in zip(sequences, counts, strict=True)
    ]
    advantages = np.repeat(np.array([s.advantage for s in sequences], dtype=np.float32), counts)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Microbatch(
        tokens=put(tokens)[None],
        positions=put(positions)[None],
        labels=put(labels)[None],
        loss_mask=put(mask)[None],
        packed=PackedSequences.of_lengths(lengths, device),
        advantages=put(advantages),
        sampler_log_probs=put(np.concatenate([np.zeros(0), *sampler]).astype(np.float32)),
        sequence_of=put(np.repeat(np.arange(len(sequences)), counts)),
        token_numbers=global_token_ids([s.number for s in sequences], counts, device),
    )


def pack_update(
    microbatches: list[list[TrainSequence]], *, common_length: int | None, multiple: int, device: torch.device
) -> list[Microbatch]:
    """Pack one replica's microbatches; `common_length` makes all alike, as pipeline stages exchange them."""

    def rounded(tokens: int) -> int:
        return max(1, -(-tokens // multiple)) * multiple

    return [
        pack(chosen, rounded(common_length or sum(map(len, chosen))), device) for chosen in microbatches
    ]
