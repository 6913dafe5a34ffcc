"""Which sequences share a replica and a microbatch: few and full microbatches, balanced work.

Pure Python over lengths alone, with these invariants, each asserted by a test: every sequence stands in
exactly one microbatch; no microbatch is above the token budget; every replica has the same number of
microbatches in an update (the pipeline's and the optimizer's collectives pair them up), a multiple of what
the pipeline asks for; the schedule depends on the lengths alone.

Microbatches are filled first, over all replicas, and dealt to replicas afterwards. The other way round, the
replica with the worst rest decides the number for all, and with a few microbatches each, budget and balance
ask for different shares. Filled evenly in tokens, microbatches need little padding where they must be equal
in length; what attention adds to their cost is balanced when they are dealt, by Karmarkar and Karp's
differencing with equal counts, and then by exchanging single sequences.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from megatron_stare.errors import UserError

# One optimizer update: for each data-parallel replica, its microbatches as lists of sequence numbers.
Schedule = list[list[list[int]]]

_EVEN = 0.001  # microbatches this near to the mean are even enough, and so are replicas
_EXCHANGES = 8  # at most that many exchanges a microbatch or replica
_PARTNERS = 4  # microbatches that the fullest tries to exchange with


def plan_update(
    lengths: Sequence[int],
    replicas: int,
    max_tokens: int,
    multiple: int = 1,
    *,
    attention_length: float = 16384.0,
) -> Schedule:
    """Pack sequences into microbatches of at most `max_tokens`, equally many for each of `replicas`.

    Their number is a multiple of `multiple` (the pipeline's size where stages are virtual). A sequence costs
    its length, and its length squared over `attention_length` for attention (see `attention_length`). Each
    replica's microbatches go from the most expensive to the cheapest, so that those that run at the same time
    are alike. Raises UserError for a sequence above the budget.
    """
    for i, length in enumerate(lengths):
        if length > max_tokens:
            raise UserError(
                f"batch.max_tokens_per_microbatch={max_tokens}: sequence {i} of the step has {length} "
                "tokens; raise it, or drop such rows"
            )
    costs = [length + length * length / attention_length for length in lengths]
    microbatches = _fill(lengths, max_tokens, replicas * multiple)
    shares = _deal(microbatches, costs, replicas)
    _exchange_between_replicas(shares, lengths, costs, max_tokens)
    return _in_order(shares, costs)


def attention_length(
    *,
    hidden_size: int,
    ffn_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    experts_per_token: int = 1,
) -> float:
    """Tokens at which a sequence's attention costs as much as its linear layers.

    A layer's weights do 2 operations each for a token; scores and values of causal attention together do
    2 x length x width of all heads for a token, on average. `ffn_size` is one expert's in a mixture. About
    12 times the hidden size where all heads together are as wide as it.
    """
    width = num_heads * head_dim
    attention = hidden_size * (2 * width + 2 * num_kv_heads * head_dim)
    gated_mlp = 3 * hidden_size * ffn_size * experts_per_token
    return (attention + gated_mlp) / width


def _fill(lengths: Sequence[int], max_tokens: int, step: int) -> list[list[int]]:
    """The fewest microbatches within the budget that we find, a multiple of `step`, filled evenly."""
    more_than_half = sum(2 * length > max_tokens for length in lengths)
    fewest = max(1, -(-sum(lengths) // max_tokens), more_than_half)
    bins = -(-fewest // step) * step
    tight: list[list[int]] | None = None
    while True:
        filled = _even(lengths, bins)
        if max(sum(lengths[i] for i in chosen) for chosen in filled) <= max_tokens:
            return filled
        tight = tight or _first_fit(lengths, max_tokens)
        if bins >= len(tight):
            return tight + [[] for _ in range(bins - len(tight))]
        bins += step


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest first, each into the first microbatch with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in _longest_first(lengths):
        fit = next((b for b, left in enumerate(room) if left >= lengths[i]), None)
        if fit is None:
            bins.append([])
            room.append(max_tokens)
            fit = len(bins) - 1
        bins[fit].append(i)
        room[fit] -= lengths[i]
    return bins


def _even(lengths: Sequence[int], count: int) -> list[list[int]]:
    """`count` microbatches of nearly equal length: longest first to the emptiest, then exchanges."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in _longest_first(lengths):
        load, b = heap[0]
        bins[b].append(i)
        heapq.heapreplace(heap, (load + lengths[i], b))
    goal = sum(load for load, _ in heap) / count * (1 + _EVEN)
    loads = sorted(heap)
    for _ in range(_EXCHANGES * count):
        load, full = loads.pop()
        if load <= goal:
            break
        # One that cannot be relieved, such as a long sequence alone, stays out from here on.
        _relieve(bins, loads, lengths, load, full)
    return bins


def _relieve(
    bins: list[list[int]], loads: list[tuple[int, int]], lengths: Sequence[int], load: int, full: int
) -> None:
    """Exchange between microbatch `full`, of length `load`, and one of the emptiest, and put both back.

    `loads` holds the others, sorted. Where nothing would help, nothing changes, and `full` stays out.
    """
    for k, (less, other) in enumerate(loads[:_PARTNERS]):
        change = _best_exchange(bins[full], bins[other], lengths, load - less)
        if change is not None:
            moved = _swap(bins[full], bins[other], *change, lengths)
            del loads[k]
            insort(loads, (load - moved, full))
            insort(loads, (less + moved, other))
            return


def _best_exchange(
    rich: list[int], poor: list[int], size: Sequence[float], gap: float, allowed=lambda _given, _taken: True
) -> tuple[int, int | None] | None:
    """The sequence to give, and the one to take for it (None: nothing), that best closes `gap`.

    None where every exchange would leave as large a gap or a larger one.
    """
    # What may be taken, by size; for each that may be given, the two nearest to half the gap less.
    offers: list[int | None] = [None, *sorted(poor, key=lambda i: (size[i], i))]
    sizes = [0.0 if i is None else size[i] for i in offers]
    best, chosen = gap, None
    for given in rich:
        near = bisect_left(sizes, size[given] - gap / 2)
        for k in (near - 1, near):
            if 0 <= k < len(sizes):
                left = abs(gap - 2 * (size[given] - sizes[k]))
                if left < best and allowed(given, offers[k]):
                    best, chosen = left, (given, offers[k])
    return chosen


def _swap(rich: list[int], poor: list[int], given: int, taken: int | None, size: Sequence[float]) -> float:
    """Carry an exchange out; how much `rich` loses."""
    rich.remove(given)
    poor.append(given)
    if taken is None:
        return size[given]
    poor.remove(taken)
    rich.append(taken)
    return size[given] - size[taken]


def _deal(microbatches: list[list[int]], costs: list[float], replicas: int) -> list[list[list[int]]]:
    """Karmarkar-Karp with equal counts: each replica gets one of every `replicas` alike microbatches.

    A partial deal is a cost and microbatches for each replica, dearest first. The two deals with the largest
    spread are joined, the dearest of one with the cheapest of the other, until one is left.
    """
    price = {id(chosen): sum(costs[i] for i in chosen) for chosen in microbatches}
    ranked = sorted(microbatches, key=lambda chosen: (-price[id(chosen)], chosen))
    deals = []
    for start in range(0, len(ranked), replicas):
        deal = [(price[id(chosen)], [chosen]) for chosen in ranked[start : start + replicas]]
        deals.append((deal[-1][0] - deal[0][0], start, deal))
    heapq.heapify(deals)
    while len(deals) > 1:
        _, start, one = heapq.heappop(deals)
        _, _, other = heapq.heappop(deals)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(deals, (joined[-1][0] - joined[0][0], start, joined))
    return [share for _, share in deals[0][2]]


def _exchange_between_replicas(
    shares: list[list[list[int]]], lengths: Sequence[int], costs: list[float], max_tokens: int
) -> None:
    """Move work from the dearest replica to the cheapest, sequence by sequence, within the budget."""
    totals = [sum(costs[i] for chosen in share for i in chosen) for share in shares]
    goal = sum(totals) / len(totals) * (1 + _EVEN)
    for _ in range(_EXCHANGES * len(shares)):
        rich = max(range(len(totals)), key=totals.__getitem__)
        poor = min(range(len(totals)), key=totals.__getitem__)
        if totals[rich] <= goal or not _exchange(
            shares[rich], shares[poor], lengths, costs, totals[rich] - totals[poor], max_tokens
        ):
            break
        for k in (rich, poor):
            totals[k] = sum(costs[i] for chosen in shares[k] for i in chosen)


def _exchange(
    rich: list[list[int]],
    poor: list[list[int]],
    lengths: Sequence[int],
    costs: list[float],
    gap: float,
    max_tokens: int,
) -> bool:
    """The best exchange between microbatches of two replicas that keeps the budget; whether there is one."""
    home = {i: chosen for share in (rich, poor) for chosen in share for i in chosen}
    load = {id(chosen): sum(lengths[i] for i in chosen) for share in (rich, poor) for chosen in share}
    emptiest = min(poor, key=lambda chosen: load[id(chosen)])

    def allowed(given: int, taken: int | None) -> bool:
        there = emptiest if taken is None else home[taken]
        more = lengths[given] - (0 if taken is None else lengths[taken])
        return load[id(there)] + more <= max_tokens and load[id(home[given])] - more <= max_tokens

    everything = [[i for chosen in share for i in chosen] for share in (rich, poor)]
    change = _best_exchange(*everything, costs, gap, allowed)
    if change is None:
        return False
    given, taken = change
    _swap(home[given], emptiest if taken is None else home[taken], given, taken, costs)
    return True


def _in_order(shares: list[list[list[int]]], costs: list[float]) -> Schedule:
    """Microbatches from dear to cheap and sequences by number, so that equal lengths give equal schedules."""

    def cost(chosen: list[int]) -> float:
        return sum(costs[i] for i in chosen)

    return [sorted((sorted(chosen) for chosen in share), key=lambda c: (-cost(c), c)) for share in shares]
