"""The exact k-th largest of values spread over ranks, without gathering them.

Non-negative IEEE-754 floats sort like their bit patterns read as integers. So
the k-th largest float32 is found digit by digit: count how often each value of
the leading 8 bits occurs, add the counts over the ranks, take the bin that
holds the k-th largest, and repeat among its members for the next 8, 8 and 7
bits. The sign bit is always 0. What travels is four histograms, 2 KB each,
whatever the number of values; the result is exact and the same on every
rank, because integer sums do not depend on the order of summation.

The values themselves are read only twice: one local histogram holds two digits
(16 bits), and the second digit's counts are the part of it that the first chose.

Letters: N values on this rank, S selections that are answered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# (shift, width of the first digit, of the second): what one reading of the values counts; 31 bits in all.
_READINGS = ((15, 8, 8), (0, 8, 7))

# Values looked at together: bounds temporary memory, whatever N. On a CPU a chunk and what is
# made of it stay in the cache; a GPU wants few and large kernels.
_CHUNK = 1 << 16
_GPU_CHUNK = 1 << 22

# A log-prob of a certain token can round to a little above 0. Anything further
# below 0 is not a surprisal but a fault of whatever computed it.
NEGATIVE_TOLERANCE = 1e-3

Members = Callable[[slice], Sequence[Tensor]]
Faults = Callable[[slice], Mapping[str, Tensor]]


@dataclass(frozen=True)
class KthLargest:
    """Answers for S selections, equal on all ranks: tensors of shape [S] on the values' device."""

    value: Tensor  # float32: the k-th largest; +inf where k is 0, so that nothing lies above it
    count: Tensor  # int64: members on all ranks
    k: Tensor  # int64
    above: Tensor  # int64: members strictly larger than `value`; always < k unless k is 0
    tied: Tensor  # int64: members equal to `value`; 0 where k is 0


@torch.no_grad()
def kth_largest(
    values: Tensor,
    members: Members,
    choose_k: Callable[[Tensor], Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    faults: Faults | None = None,
) -> KthLargest:
    """Find the k-th largest member of each of S selections over all ranks of `group`.

    Four all-reduces whatever S and N (4 KB each for two selections), and one wait
    for the device, at the end. Temporary memory does not grow with N.

    Args:
        values: [N] floats on this rank, N >= 0; compared as float32 by `order_bits`.
        members: for a slice of the values, S boolean masks of the slice's length.
            Selections may overlap. S is the same on every rank.
        choose_k: from the members' number on all ranks ([S] int64) to k ([S] int64,
            0 <= k <= number); must not depend on the rank.
        group: the ranks that share the values; None for this process alone.
        faults: for a slice, masks of values that make the question meaningless, by
            name. Default: `value_faults` of all members.

    Raises:
        ValueError: a fault occurred on any rank, or k is out of range. Fault counts
            travel with the first histogram, so every rank of the group raises alike
            and none is left waiting.
    """
    if values.dim() != 1:
        raise ValueError(f"values must have one dimension, not shape {tuple(values.shape)}")
    faults = faults or _member_faults(values, members)

    names, fault_counts = _count_faults(values, faults)
    prefix = None  # leading bits of the answer, as far as they are known
    for reading in _READINGS:
        _, coarse, fine = reading
        local = _histogram(values, members, reading, prefix).unflatten(1, (1 << coarse, 1 << fine))
        if prefix is None:
            digits = local.sum(dim=2)
            packed = _all_reduce(torch.cat([digits.flatten(), fault_counts]), group)
            digits, fault_counts = packed[: digits.numel()].view_as(digits), packed[digits.numel() :]
            count = digits.sum(dim=1)
            k = remaining = choose_k(count)
            above = prefix = torch.zeros_like(k)
        else:
            digits = _all_reduce(local.sum(dim=2), group)
        first, larger, _ = _bin_of_rank(digits, remaining)
        above, remaining = above + larger, remaining - larger
        inside = local.gather(1, first.view(-1, 1, 1).expand(-1, 1, 1 << fine)).squeeze(1)
        second, larger, tied = _bin_of_rank(_all_reduce(inside, group), remaining)
        above, remaining = above + larger, remaining - larger
        prefix = (((prefix << coarse) | first) << fine) | second

    # The only wait for the device.
    *found, wrong_k = torch.cat([fault_counts, ((k < 0) | (k > count)).any().long().view(1)]).tolist()
    broken = [f"{name} at {number} tokens" for name, number in zip(names, found, strict=True) if number]
    if broken:
        raise ValueError("; ".join(broken) + " (over all ranks)")
    if wrong_k:
        raise ValueError(f"k={k.tolist()} is not between 0 and the number of values {count.tolist()}")

    some = k > 0
    value = torch.where(some, prefix.to(torch.int32).view(torch.float32), torch.inf)
    return KthLargest(
        value=value,
        count=count,
        k=k,
        above=torch.where(some, above, 0),
        tied=torch.where(some, tied, 0),
    )


def order_bits(values: Tensor) -> Tensor:
    """int32 keys, shaped like `values`, that sort as the values do; negative ones become 0.

    Every comparison of surprisals goes through these keys: the values of a batch
    must be compared in exactly one way, or a tie on one path is none on another. A NaN
    has no place; whoever ranks values refuses it (`value_faults`).
    """
    return values.float().view(torch.int32).clamp(min=0)  # with the sign bit, an integer is negative


def value_faults(values: Tensor, where: Tensor, name: str = "value") -> dict[str, Tensor]:
    """Masks of `values` that cannot be ranked: NaN, and (also infinitely) below 0. +inf is the largest."""
    return {
        f"{name} is NaN": where & values.isnan(),
        f"{name} is below 0": where & (values < -NEGATIVE_TOLERANCE),
    }


def slices(length: int, device: torch.device) -> Iterator[slice]:
    """Cover range(length) in pieces of a size that suits the device; one empty piece if it is empty."""
    chunk = _CHUNK if device.type == "cpu" else _GPU_CHUNK
    for start in range(0, max(length, 1), chunk):
        yield slice(start, min(start + chunk, length))


def _member_faults(values: Tensor, members: Members) -> Faults:
    def faults(part: slice) -> Mapping[str, Tensor]:
        anywhere = torch.stack(list(members(part))).any(dim=0)
        return value_faults(values[part], anywhere)

    return faults


def _count_faults(values: Tensor, faults: Faults) -> tuple[list[str], Tensor]:
    names: list[str] = []
    total: Tensor | None = None
    for part in slices(values.numel(), values.device):
        masks = faults(part)
        names = list(masks)
        counts = torch.stack([mask.sum() for mask in masks.values()])
        total = counts if total is None else total + counts
    assert total is not None  # slices() yields at least once
    return names, total


def _histogram(
    values: Tensor, members: Members, reading: tuple[int, int, int], prefix: Tensor | None
) -> Tensor:
    """[S, bins] int64: how often each digit pair occurs among members with leading bits `prefix` ([S])."""
    shift, width = reading[0], reading[1] + reading[2]
    counts: list[Tensor] = []
    for part in slices(values.numel(), values.device):
        bits = order_bits(values[part])
        digits = ((bits >> shift) & ((1 << width) - 1)).long()
        leading = bits >> (shift + width)
        for s, member in enumerate(members(part)):
            if s == len(counts):
                counts.append(torch.zeros(1 << width, dtype=torch.int64, device=values.device))
            if prefix is not None:
                member = member & (leading == prefix[s])
            # Adding 0 for the others needs no index list of unknown length, hence no
            # wait for the device; on a CPU it is also faster than bincount.
            counts[s].scatter_add_(0, digits, member.long())
    return torch.stack(counts)


def _bin_of_rank(digits: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row: the bin with the k-th largest, how many lie in bins above it, and how many in it."""
    bins = digits.shape[1]
    from_top = digits.flip(1).cumsum(1)
    place = torch.searchsorted(from_top, k.unsqueeze(1)).clamp_(max=bins - 1)
    inside = digits.flip(1).gather(1, place)
    larger = from_top.gather(1, place) - inside
    return bins - 1 - place.squeeze(1), larger.squeeze(1), inside.squeeze(1)


def _all_reduce(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts
