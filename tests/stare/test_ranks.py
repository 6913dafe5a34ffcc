"""Real processes over gloo: however a batch is split over ranks, the weights equal one process's to the bit.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_stare
from megatron_stare.stare import ReweightRule, surprisal_thresholds, token_weights

WORLD = 3
TIME_LIMIT = 120.0
CASES = 60  # with each number of ranks


def test_any_split_over_two_or_three_ranks_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    root = str(Path(megatron_stare.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logs = [tmp_path / f"rank{rank}.log" for rank in range(WORLD)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, __file__, str(rank), str(tmp_path / "store")]
            with log.open("w") as out:
                ranks.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
        deadline = time.monotonic() + TIME_LIMIT
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * WORLD, "\n".join(log.read_text()[-3000:] for log in logs)
    done = [f"{number} ranks: {CASES} cases equal" for number in (2, 3)]
    assert [log.read_text().splitlines()[-2:] for log in logs] == [done, done, ["not in the group", done[1]]]


def make_case(seed: int) -> tuple[list[torch.Tensor], ReweightRule]:
    """A global batch, the same on every rank: ties, equal values, zeros, infinities, empty signs."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    n = dice.choice([0, 1, 2, 7, 50, 1000])
    surprisal = -torch.rand(n, generator=generator).log()
    kind = dice.choice(["plain", "ties", "equal", "zeros", "infinite"])
    if kind == "ties":
        surprisal = (surprisal * 4).round() / 4
    elif kind == "equal":
        surprisal = torch.full((n,), 0.7)
    elif kind == "zeros":
        surprisal = torch.where(surprisal < 0.7, -1e-8, surprisal)
    elif kind == "infinite":
        surprisal = torch.where(surprisal > 2, math.inf, surprisal)
    advantage = torch.randint(dice.choice([-2, 0, 1]), 3, (n,), generator=generator).float()
    mask = torch.rand(n, generator=generator) < dice.choice([0.0, 0.5, 1.0])
    P = dice.choice([0.001, 0.1, 0.37, 1.0])
    rule = dice.choice(
        [
            ReweightRule.o1(1.3, P),
            ReweightRule.c2(1.3, 0.6, P),
            ReweightRule.four_quadrant(M_low=0.8, M=0.7, top_fraction=P),
        ]
    )
    return [surprisal, advantage, mask], rule


def one_rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    pair = dist.new_group([0, 1])
    if rank in (0, 1):
        splits_do_not_matter(rank, 2, pair)
        faults_reach_every_rank(rank, 2, pair)
        print(f"2 ranks: {CASES} cases equal", flush=True)
    else:
        print("not in the group", flush=True)
    splits_do_not_matter(rank, 3, dist.group.WORLD)
    faults_reach_every_rank(rank, 3, dist.group.WORLD)
    print(f"3 ranks: {CASES} cases equal", flush=True)
    dist.destroy_process_group()


def splits_do_not_matter(rank: int, world: int, group: dist.ProcessGroup) -> None:
    calls = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args, **kwargs):
        calls.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted

    for seed in range(CASES):
        batch, rule = make_case(seed)
        expected = token_weights(*batch, rule)
        assert not calls  # group=None talks to nobody
        n = len(batch[0])
        generator = torch.Generator().manual_seed(1000 + seed)
        # Some splits leave ranks without any token.
        owners = torch.randint(0, 1 + seed % world, (n,), generator=generator)
        order = torch.randperm(n, generator=generator)
        mine = order[owners[order] == rank]
        local = [tensor[mine] for tensor in batch]
        assert torch.equal(token_weights(*local, rule, group), expected[mine]), f"case {seed}"
        assert len(calls) == 4 and sum(calls) < 16_000, calls
        # The same through thresholds, microbatch by microbatch.
        thresholds = surprisal_thresholds(*local, rule, group)
        parts = [
            token_weights(*(tensor[i::3] for tensor in local), rule, thresholds=thresholds) for i in range(3)
        ]
        assert all(torch.equal(part, expected[mine][i::3]) for i, part in enumerate(parts)), f"case {seed}"
        calls.clear()
    dist.all_reduce = all_reduce


def faults_reach_every_rank(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """One rank's bad number stops all with the same words, and leaves the ranks in step."""
    for column, value, words in (
        (0, math.nan, "surprisal is NaN at 2 tokens (over all ranks)"),
        (0, -1.0, "surprisal is below 0 at 2 tokens (over all ranks)"),
        (1, math.inf, "advantage is not finite at 2 tokens (over all ranks)"),
    ):
        batch = [torch.ones(4), torch.ones(4), torch.ones(4)]
        if rank == world - 1:
            batch[column][1:3] = value
        try:
            surprisal_thresholds(*batch, ReweightRule.o1(), group)
        except ValueError as error:
            assert str(error) == words, error
        else:
            raise AssertionError(f"rank {rank} accepted {value}")
    thresholds = surprisal_thresholds(*[torch.ones(4)] * 3, ReweightRule.o1(), group)
    assert thresholds.count.tolist() == [4 * world, 0]


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), sys.argv[2])
