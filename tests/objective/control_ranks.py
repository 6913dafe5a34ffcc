"""What one rank of test_entropy_control.py does: prepare every control for its part of random batches."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_stare.objective import ClipCov, EntropyAdvantage, KlCov, TokenTerms, TopEntropy, prepare
from megatron_stare.objective.selection import exact_means

CONTROLS = [
    EntropyAdvantage(),
    TopEntropy(0.2),
    TopEntropy(0.031),
    ClipCov(fraction=0.05, low=0.1, high=2.0),
    ClipCov(),
    KlCov(fraction=0.1, coef=0.7),
    KlCov(),
]


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """A global batch, the same everywhere: ties, zeros, no tokens, rewards far from 1, masked junk."""
    g = torch.Generator().manual_seed(seed)
    n = [0, 1, 2, 50, 3000][seed % 5]
    scale = [1.0, 1e-4, 3e4][seed % 3]
    log_probs = torch.rand(n, generator=g).log()
    entropy = torch.rand(n, generator=g)
    if seed % 4 == 1:
        entropy, log_probs = (entropy * 5).round() / 5, (log_probs * 2).round() / 2
    mask = torch.rand(n, generator=g) < [1.0, 0.7, 0.0][seed % 7 % 3]
    junk = torch.full((n,), torch.nan)
    return {
        "log_probs": torch.where(mask, log_probs, junk),
        "entropy": torch.where(mask, entropy, junk),
        "advantages": torch.where(mask, scale * torch.randn(n, generator=g).round(decimals=1), junk),
        "mask": mask,
        "token_ids": torch.arange(n) * 7919 + (seed << 33),
    }


def all_terms(batch: dict[str, torch.Tensor], seed: int, group: dist.ProcessGroup | None) -> list[TokenTerms]:
    return [prepare(control, **batch, seed=seed, step=seed * 3, group=group) for control in CONTROLS]


def compare(cases: int) -> int:
    """Split each batch at random over the ranks, in random order: every term is one process's to the bit."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    compared = 0
    for seed in range(cases):
        batch = make_batch(seed)
        n = batch["mask"].numel()
        expected = all_terms(batch, seed, None)
        g = torch.Generator().manual_seed(1000 + seed)
        owners = torch.randint(0, 1 + seed % world, (n,), generator=g)  # some ranks get nothing
        order = torch.randperm(n, generator=g)
        mine = order[owners[order] == rank]
        found = all_terms({name: x[mine] for name, x in batch.items()}, seed, dist.group.WORLD)
        for control, a, b in zip(CONTROLS, found, expected, strict=True):
            assert [name for name, _ in a.items()] == [name for name, _ in b.items()]
            for (name, mine_values), (_, values) in zip(a.items(), b.items(), strict=True):
                assert torch.equal(mine_values, values[mine]), (seed, control, name)
                compared += 1
        # Values of all sizes, whose float64 sum depends on its order.
        x = torch.randn(n, generator=g) * (8 * torch.randn(n, generator=g)).exp() * 10.0 ** (-20 * (seed % 2))
        (mean,), _ = exact_means({"x": x}, batch["mask"], None)
        (split,), _ = exact_means({"x": x[mine]}, batch["mask"][mine], dist.group.WORLD)
        assert torch.equal(mean, split), (seed, mean, split)
        compared += 1
    compared += _faults_reach_every_rank(rank)
    dist.destroy_process_group()
    return compared


def _faults_reach_every_rank(rank: int) -> int:
    """A NaN on rank 0 only raises everywhere, and the group can be used afterwards."""
    raised = 0
    for control in (TopEntropy(), ClipCov(), KlCov()):
        values = torch.full((4,), torch.nan if rank == 0 else 0.5)
        try:
            prepare(
                control,
                log_probs=-values,
                entropy=values,
                advantages=torch.ones(4),
                token_ids=torch.arange(4) + 4 * rank,
                group=dist.group.WORLD,
            )
        except ValueError as error:
            assert "at 4 tokens (over all ranks)" in str(error), error
            raised += 1
    dist.barrier()
    assert raised == 3
    return raised
