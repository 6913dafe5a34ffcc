"""From responses to packed microbatches.

The schedule is pure Python and holds these invariants, each asserted by a test: every sequence stands in
exactly one microbatch; no microbatch is above the token budget; every replica has the same number of
microbatches in an update (the pipeline's and the optimizer's collectives pair them up); the order of
replicas, updates and microbatches depends on the lengths alone.
"""

from __future__ import annotations

import heapq
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


# One optimizer update: for each data-parallel replica, its microbatches as lists of sequence numbers.
Schedule = list[list[list[int]]]


def plan_update(lengths: list[int], replicas: int, max_tokens: int, multiple: int = 1) -> Schedule:
    """Assign sequences to `replicas` and pack each replica's into equally many microbatches.

    Their number is a multiple of `multiple` (the pipeline's size where stages are virtual). Replicas are
    balanced by cost, longest sequence first. Raises ValueError for a sequence above the budget.
    """
    for i, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sequence {i} has {length} tokens, above max_tokens_per_microbatch={max_tokens}"
            )
    shares = _balance(range(len(lengths)), lengths, replicas)
    bins = max([1, *(len(_first_fit(share, lengths, max_tokens)) for share in shares)])
    bins = -(-bins // multiple) * multiple
    return [_spread(share, lengths, bins, max_tokens) for share in shares]


def _cost(length: int) -> float:
    """Work of a sequence relative to one token: linear layers, plus attention growing with the length."""
    return length + length * length / 16384


def _longest_first(items, lengths: list[int]) -> list[int]:
    return sorted(items, key=lambda i: (-lengths[i], i))


def _balance(items, lengths: list[int], parts: int) -> list[list[int]]:
    """Longest processing time first: each sequence goes to the part with the least work."""
    heap = [(0.0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for i in _longest_first(items, lengths):
        work, part = heapq.heappop(heap)
        shares[part].append(i)
        heapq.heappush(heap, (work + _cost(lengths[i]), part))
    return shares


def _first_fit(items, lengths: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in _longest_first(items, lengths):
        fit = next((b for b, left in enumerate(room) if left >= lengths[i]), None)
        if fit is None:
            bins.append([])
            room.append(max_tokens)
            fit = len(bins) - 1
        bins[fit].append(i)
        room[fit] -= lengths[i]
    return bins


def _spread(items, lengths: list[int], bins: int, max_tokens: int) -> list[list[int]]:
    """Pack into exactly `bins` microbatches: evenly where that keeps the budget, else tightly."""
    even = _balance(items, lengths, bins)
    if all(sum(lengths[i] for i in chosen) <= max_tokens for chosen in even):
        return even
    tight = _first_fit(items, lengths, max_tokens)
    return tight + [[] for _ in range(bins - len(tight))]


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
