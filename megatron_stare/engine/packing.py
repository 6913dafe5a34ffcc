"""Which sequences share a replica and a microbatch: balanced work, full microbatches.

Pure Python over lengths alone, with these invariants, each asserted by a test: every sequence stands in
exactly one microbatch; no microbatch is above the token budget; every replica has the same number of
microbatches in an update (the pipeline's and the optimizer's collectives pair them up); the order of
replicas, updates and microbatches depends on the lengths alone.
"""

from __future__ import annotations

import heapq

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
