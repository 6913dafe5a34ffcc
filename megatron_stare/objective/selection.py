"""Choosing tokens of the global batch, the same ones whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.stare.quantile import kth_largest, order_bits, value_faults

_SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def top_share(
    values: Tensor,
    members: Tensor,
    k: float | Callable[[Tensor], Tensor],
    group: dist.ProcessGroup | None,
    name: str,
) -> Tensor:
    """float32 [tokens]: 1 for the k largest members over all ranks, 0 for the others and for non-members.

    Members that tie exactly at the k-th share the places left. Three small all-reduces, see `kth_largest`.

    Args:
        values: [tokens], compared as float32; NaN and values below 0 are refused.
        members: bool [tokens].
        k: a fraction f of the members, ceil(f * number) of them; or a function from their number to k, as
            for `kth_largest`.
        name: of the values, for errors.

    Raises:
        ValueError: on every rank alike, a member that is NaN or below 0.
    """
    choose = k if callable(k) else lambda count: _ceiling(_decimal(k), count)
    found = kth_largest(
        values,
        lambda part: [members[part]],
        choose,
        group=group,
        faults=lambda part: value_faults(values[part], members[part], name),
    )
    bits, limit = order_bits(values), order_bits(found.value)
    tied = (found.k - found.above).double() / found.tied.clamp(min=1)
    share = torch.where(bits > limit, 1.0, torch.where(bits == limit, tied.float(), 0.0))
    return torch.where(members, share, 0.0)


def count_of_all(fraction: float, total: int) -> Callable[[Tensor], Tensor]:
    """For `top_share`: floor(fraction * total), at least 1, as far as there are members."""
    k = max(1, math.floor(_decimal(fraction) * total))
    return lambda count: count.clamp(max=k)


@torch.no_grad()
def exact_means(
    named: Mapping[str, Tensor], inside: Tensor, group: dist.ProcessGroup | None
) -> tuple[list[Tensor], int]:
    """Means over the masked tokens of all ranks, the same to the bit for any layout; and their number.

    Sums of floats depend on the order of summation. So the values are summed as integer multiples of a
    power of two, the finest for which the sum of all fits 62 bits. The error is at most (number of tokens)
    * 2^-61 times the largest value, or times 1 if that is larger. Two small all-reduces.

    Returns:
        float64 scalars, 0 without tokens.

    Raises:
        ValueError: on every rank alike, a masked value that is not finite.
    """
    values = torch.stack([torch.where(inside, tensor.double(), 0) for tensor in named.values()]).flatten(1)
    bad = ~values.isfinite()
    counts = torch.cat([inside.sum().view(1), bad.sum(dim=1)])
    # The power of two above every value; not below 1, for which a rank without tokens stands.
    largest = torch.cat([torch.where(bad, 0, values).abs(), values.new_ones(len(named), 1)], dim=1)
    exponents = largest.amax(dim=1).frexp().exponent.long()
    if group is not None:
        dist.all_reduce(counts, group=group)
        dist.all_reduce(exponents, op=dist.ReduceOp.MAX, group=group)
    tokens, *broken = counts.tolist()
    faults = [f"{name} is not finite at {n} tokens" for name, n in zip(named, broken, strict=True) if n]
    if faults:
        raise ValueError("; ".join(faults) + " (over all ranks)")
    unit = values.new_tensor([2.0 ** (e + tokens.bit_length() - 61) for e in exponents.tolist()])
    sums = (values / unit[:, None]).round().long().sum(dim=1)
    if group is not None:
        dist.all_reduce(sums, group=group)
    return list(sums * unit / max(tokens, 1)), tokens


def random_priority(token_ids: Tensor, seed: int, step: int) -> Tensor:
    """float32 [tokens] above 0: a random number for each id, the same on any rank, for this seed and step.

    A hash (the finaliser of splitmix64), since a generator's numbers depend on how many are drawn before.
    30 bits of it are read as a positive float, so its order is that of 2^30 equally likely numbers.
    """
    key = torch.tensor([seed, step], dtype=torch.int64, device=token_ids.device)
    state = _mix(_mix(_mix(key[0]) ^ key[1]) ^ token_ids)
    smallest_normal = 0x00800000
    return ((state & 0x3FFFFFFF) + smallest_normal).int().view(torch.float32)


def _mix(x: Tensor) -> Tensor:
    add, first, second = (n - (1 << 64) if n >> 63 else n for n in _SPLITMIX)
    x = x + add
    x = (x ^ _shift_right(x, 30)) * first
    x = (x ^ _shift_right(x, 27)) * second
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Of the 64 bits as an unsigned number: torch's shift of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _decimal(fraction: float) -> Fraction:
    """The decimal number that was written: 0.07 of 100 are 7, though 0.07 * 100 is more than 7."""
    return Fraction(repr(float(fraction))).limit_denominator(10**9)


def _ceiling(share: Fraction, count: Tensor) -> Tensor:
    return (share.numerator * count + share.denominator - 1) // share.denominator
