"""What finding STARE's thresholds costs, against gathering every surprisal and torch.topk.

    python -m benchmarks.quantile [--ranks N] [--tokens N] [--repeats N]

Real processes over gloo. Both sides answer the same question in turn, for tokens of both advantage signs at
once, and must agree to the bit. The rival is made as cheap as it can be: surprisal and sign travel as one
float, and topk does not sort. Bytes are those that a rank puts into collectives, counted at each call.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import note, report
from megatron_stare.stare import ReweightRule, surprisal_thresholds

_RULE = ReweightRule.o1(top_fraction=0.1)
_LIMIT = timedelta(minutes=5)  # a rank that waits longer for another gives up

_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

Contestant = Callable[[Tensor, Tensor, dist.ProcessGroup], list[float]]


@click.command()
@click.option("--ranks", default=4, show_default=True, help="Processes.")
@click.option("--tokens", default=4_000_000, show_default=True, help="Tokens a rank.")
@click.option("--repeats", default=5, show_default=True, help="Times each is measured.")
def main(ranks: int, tokens: int, repeats: int) -> None:
    """Print one JSON line: bytes_gather_over_ours, time_gather_over_ours."""
    os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores; more threads each make everything slower
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="benchmark-quantile-") as scratch:
        arguments = (ranks, tokens, repeats, scratch)
        torch.multiprocessing.start_processes(_one_rank, arguments, nprocs=ranks, start_method="spawn")
        result = json.loads(Path(scratch, "result.json").read_text())
    report("quantile", result["ratios"], result["figures"])


def _one_rank(rank: int, ranks: int, tokens: int, repeats: int, scratch: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{scratch}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=_LIMIT)
    try:
        result = _compare(rank, ranks, tokens, repeats)
        result["figures"] |= _scaling(rank, ranks, tokens, repeats)
        if rank == 0:
            Path(scratch, "result.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _compare(rank: int, ranks: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Ours and gathering in turn on all ranks: ratios, and the numbers behind them."""
    _note(rank, f"{ranks} ranks x {tokens / 1e6:g}M tokens: ours, then gathering, {repeats} times")
    batch, everyone = _batch(rank, tokens), dist.group.WORLD
    answers, bytes_in = {}, {}
    for name, contestant in (("ours", _ours), ("gather", _gather)):  # also warms up
        with _counted_bytes() as counted:
            answers[name] = contestant(*batch, everyone)
        bytes_in[name] = sum(counted)
    if answers["ours"] != answers["gather"]:
        raise AssertionError(f"thresholds differ: {answers}")
    seconds: dict[str, list[float]] = {"ours": [], "gather": []}
    for _ in range(repeats):
        seconds["ours"].append(_timed(_ours, batch, everyone)[0])
        seconds["gather"].append(_timed(_gather, batch, everyone)[0])
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "ratios": {
            "bytes_gather_over_ours": bytes_in["gather"] / bytes_in["ours"],
            "time_gather_over_ours": median["gather"] / median["ours"],
        },
        "figures": {
            "ranks": ranks,
            "tokens_a_rank": tokens,
            **{f"{name}_bytes_a_rank": value for name, value in bytes_in.items()},
            **{f"{name}_seconds": value for name, value in median.items()},
        },
    }


def _scaling(rank: int, ranks: int, tokens: int, repeats: int) -> dict[str, float]:
    """Ours: seconds by tokens a rank on all ranks, and by number of ranks at `tokens` a rank.

    Ranks beyond the number of cores wait for each other, so seconds grow with the ranks of one machine
    whatever the algorithm, and with whatever else runs there; `cpu_seconds` (of a core, by the first rank)
    shows the work itself.
    """
    figures: dict[str, float] = {}
    for part in (4, 2, 1):
        _note(rank, f"{ranks} ranks x {tokens / part / 1e6:g}M tokens: ours")
        batch = _batch(rank, tokens // part)
        wall, cpu = _median_of(repeats, batch, dist.group.WORLD)
        figures[f"seconds_{tokens / part / 1e6:g}M_tokens"] = wall
        figures[f"cpu_seconds_{tokens / part / 1e6:g}M_tokens"] = cpu
    number = 1
    while number <= ranks:
        group = dist.new_group(list(range(number)), timeout=_LIMIT)
        _note(rank, f"{number} ranks x {tokens / 1e6:g}M tokens: ours")
        if rank < number:
            wall, cpu = _median_of(repeats, _batch(rank, tokens), group)
            figures[f"seconds_{number}_ranks"] = wall
            figures[f"cpu_seconds_{number}_ranks"] = cpu
        dist.barrier()
        number *= 2
    return figures


def _median_of(repeats: int, batch: tuple[Tensor, Tensor], group: dist.ProcessGroup) -> tuple[float, float]:
    _ours(*batch, group)
    times = [_timed(_ours, batch, group) for _ in range(repeats)]
    return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)


def _timed(
    contestant: Contestant, batch: tuple[Tensor, Tensor], group: dist.ProcessGroup
) -> tuple[float, float]:
    """Seconds from when all ranks begin to when the last is done, and this rank's own on a core."""
    dist.barrier(group)
    begin, work = perf_counter(), process_time()
    contestant(*batch, group)
    work = process_time() - work
    dist.barrier(group)
    return perf_counter() - begin, work


def _batch(rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Surprisals with the long tail of a language model's, and advantages of both signs."""
    generator = torch.Generator().manual_seed(rank)
    surprisal = torch.rand(tokens, generator=generator).log_().neg_().pow_(3)
    return surprisal, torch.randn(tokens, generator=generator)


def _ours(surprisal: Tensor, advantage: Tensor, group: dist.ProcessGroup) -> list[float]:
    mask = torch.ones_like(surprisal, dtype=torch.bool)
    return surprisal_thresholds(surprisal, advantage, mask, _RULE, group).value.tolist()


def _gather(surprisal: Tensor, advantage: Tensor, group: dist.ProcessGroup) -> list[float]:
    signed = torch.copysign(surprisal, advantage)
    everywhere = signed.new_empty(signed.numel() * dist.get_world_size(group))
    getattr(dist, _ALL_GATHER)(everywhere, signed, group=group)
    thresholds = []
    negative = everywhere.signbit()
    for chosen in (everywhere[~negative], everywhere[negative].neg_()):
        k = -(-chosen.numel() // 10)
        thresholds.append(chosen.topk(k, sorted=False).values.min().item())
    return thresholds


@contextmanager
def _counted_bytes() -> Iterator[list[int]]:
    """Collects the bytes that this rank puts into each collective."""
    counted: list[int] = []
    reduce, gather = dist.all_reduce, getattr(dist, _ALL_GATHER)

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counted.append(tensor.nbytes)
        return reduce(tensor, *args, **kwargs)

    def all_gather(output: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counted.append(tensor.nbytes)
        return gather(output, tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    setattr(dist, _ALL_GATHER, all_gather)
    try:
        yield counted
    finally:
        dist.all_reduce = reduce
        setattr(dist, _ALL_GATHER, gather)


def _note(rank: int, text: str) -> None:
    if rank == 0:
        note(text)


if __name__ == "__main__":
    main()
