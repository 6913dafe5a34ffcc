"""How full and how balanced the schedule of a step is, and what it costs to make.

    python -m benchmarks.packing [--seeds N] [--repeats N]

Lengths are lognormal, cut at a limit. `utilisation` is tokens over microbatches x budget of all replicas: as
all replicas take equally many microbatches, and whole ones, no schedule can exceed tokens over the budget
rounded up, which is printed beside it as `best`. `imbalance` is the dearest replica's cost over the mean
less 1, a sequence costing its length plus its length squared over 16384. `padded` is tokens over what the
schedule computes where all microbatches are padded to the longest, as in a pipeline.

The ratios are the worst of all seeds in the first setting; the figures, those of every setting. The rival,
`karmarkar_karp_first`, is the usual way: sequences to replicas by Karmarkar and Karp's differencing of costs,
each replica then packs its own, longest first, and the one with the most microbatches sets the number.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import click

from benchmarks.common import note, report
from megatron_stare.engine.packing import Schedule, plan_update

_ATTENTION_LENGTH = 16384.0
_COMPARED = ("utilisation", "utilisation_over_best", "padded", "imbalance", "seconds")


@dataclass(frozen=True)
class Setting:
    """Responses of a step, and what they are packed into."""

    responses: int
    median: int
    sigma: float
    longest: int
    budget: int
    replicas: int = 8

    def lengths(self, seed: int) -> list[int]:
        """Lognormal, at most the longest, at least 1."""
        drawn = random.Random(seed)
        lengths = [drawn.lognormvariate(math.log(self.median), self.sigma) for _ in range(self.responses)]
        return [max(1, min(self.longest, round(length))) for length in lengths]


SETTINGS = {
    "main": Setting(2048, median=1800, sigma=0.7, longest=8192, budget=16384),
    "short": Setting(2048, median=1000, sigma=0.8, longest=8192, budget=16384),
    "small_budget": Setting(2048, median=1000, sigma=0.8, longest=8192, budget=8192),
    "long_tail": Setting(2048, median=1000, sigma=1.2, longest=16384, budget=16384),
    "long_thoughts": Setting(2048, median=3000, sigma=1.0, longest=32768, budget=32768),
    "few": Setting(256, median=1800, sigma=0.7, longest=8192, budget=16384),
    "large": Setting(16384, median=3000, sigma=1.0, longest=32768, budget=32768, replicas=64),
}


@click.command()
@click.option("--seeds", default=10, show_default=True, help="Batches of each setting.")
@click.option("--repeats", default=3, show_default=True, help="Times each is scheduled; the median counts.")
def main(seeds: int, repeats: int) -> None:
    """Print one JSON line: utilisation, imbalance, seconds."""
    figures: dict[str, float] = {"seeds": seeds}
    for name, setting in SETTINGS.items():
        worst = _worst(_ours, setting, seeds, repeats)
        note(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in worst.items()))
        figures |= {f"{name}_{key}": value for key, value in worst.items()}
    for name in ("main", "small_budget", "long_tail", "few"):
        rival = _worst(_karmarkar_karp_first, SETTINGS[name], seeds, repeats)
        note(f"{name}, the rival: " + ", ".join(f"{key} {value:.4g}" for key, value in rival.items()))
        figures |= {f"{name}_karmarkar_karp_first_{key}": rival[key] for key in _COMPARED}
    report(
        "packing", {key: figures[f"main_{key}"] for key in ("utilisation", "imbalance", "seconds")}, figures
    )


def _worst(
    plan: Callable[[Setting, list[int]], Schedule], setting: Setting, seeds: int, repeats: int
) -> dict[str, float]:
    """The worst of all seeds in each respect; `best` is that of the least full one."""
    seen = [_measure(plan, setting, setting.lengths(seed), repeats) for seed in range(seeds)]
    least = min(seen, key=lambda one: one["utilisation"])
    return {
        "mean_length": statistics.mean(one["mean_length"] for one in seen),
        "utilisation": least["utilisation"],
        "best": least["best"],
        "utilisation_over_best": min(one["utilisation"] / one["best"] for one in seen),
        "padded": min(one["padded"] for one in seen),
        "imbalance": max(one["imbalance"] for one in seen),
        "seconds": max(one["seconds"] for one in seen),
    }


def _measure(
    plan: Callable[[Setting, list[int]], Schedule], setting: Setting, lengths: list[int], repeats: int
) -> dict[str, float]:
    seconds = []
    for _ in range(repeats):
        begin = perf_counter()
        schedule = plan(setting, lengths)
        seconds.append(perf_counter() - begin)
    filled = [sum(lengths[i] for i in chosen) for share in schedule for chosen in share]
    counts = {len(share) for share in schedule}
    placed = sorted(i for share in schedule for chosen in share for i in chosen)
    if placed != list(range(len(lengths))) or len(counts) != 1 or max(filled) > setting.budget:
        raise AssertionError("not a schedule")
    costs = [sum(_cost(lengths[i]) for chosen in share for i in chosen) for share in schedule]
    room = setting.budget * setting.replicas
    return {
        "mean_length": sum(lengths) / len(lengths),
        "utilisation": sum(lengths) / (room * counts.pop()),
        "best": sum(lengths) / (room * -(-sum(lengths) // room)),
        "padded": sum(lengths) / (max(filled) * len(filled)),
        "imbalance": max(costs) / statistics.mean(costs) - 1,
        "seconds": statistics.median(seconds),
    }


def _ours(setting: Setting, lengths: list[int]) -> Schedule:
    return plan_update(lengths, setting.replicas, setting.budget, attention_length=_ATTENTION_LENGTH)


def _cost(length: int) -> float:
    return length + length * length / _ATTENTION_LENGTH


def _karmarkar_karp_first(setting: Setting, lengths: list[int]) -> Schedule:
    shares = [_first_fit(share, lengths, setting.budget) for share in _differencing(setting, lengths)]
    most = max(map(len, shares))
    return [share + [[] for _ in range(most - len(share))] for share in shares]


def _differencing(setting: Setting, lengths: list[int]) -> list[list[int]]:
    """Join the two partial partitions with the largest spread, the dearest part with the cheapest."""
    empty = [(0.0, [])] * (setting.replicas - 1)
    partial = [(-_cost(length), i, [(_cost(length), [i]), *empty]) for i, length in enumerate(lengths)]
    heapq.heapify(partial)
    while len(partial) > 1:
        _, i, one = heapq.heappop(partial)
        _, _, other = heapq.heappop(partial)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(partial, (joined[-1][0] - joined[0][0], i, joined))
    return [chosen for _, chosen in partial[0][2]]


def _first_fit(share: list[int], lengths: list[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(share, key=lambda i: -lengths[i]):
        fit = next((b for b, left in enumerate(room) if left >= lengths[i]), len(bins))
        if fit == len(bins):
            bins.append([])
            room.append(budget)
        bins[fit].append(i)
        room[fit] -= lengths[i]
    return bins


if __name__ == "__main__":
    main()
