"""Which tokens STARE reweights, and by how much (arXiv 2606.19236).

A token's *surprisal* is -ln pi(token) under the policy at the start of the
step. Among the tokens of one pool the `top_fraction` of highest surprisal are
"high", the others "low". With the sign of the advantage that makes four
quadrants, and a rule gives each quadrant a weight, which multiplies the token's
clipped objective.

The pool is the *global* batch: all ranks of `group`, all microbatches of the
step. The authors' released code ranks inside each microbatch of each rank; on
one microbatch and one rank both agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.stare.quantile import kth_largest, order_bits, slices, value_faults

Pool = Literal["per_sign", "all"]

QUADRANTS = ("high_positive", "low_positive", "high_negative", "low_negative")


@dataclass(frozen=True)
class ReweightRule:
    """A weight for each quadrant of (surprisal high or low, advantage positive or negative).

    Args:
        high_positive, low_positive, high_negative, low_negative: weights, all above 0,
            so that no gradient changes direction.
        top_fraction: P in [0, 1], the share of a pool that is high.
        pool: "per_sign": the tokens of each advantage sign are ranked on their own;
            "all": all masked tokens together, those of zero advantage included.
        name: which published rule this is; decides what a schedule may move.

    Raises:
        ValueError: a weight or a fraction that is out of range, by name.
    """

    high_positive: float = 1.0
    low_positive: float = 1.0
    high_negative: float = 1.0
    low_negative: float = 1.0
    top_fraction: float = 0.1
    pool: Pool = "per_sign"
    name: Literal["o1", "c2", "four_quadrant", "custom"] = "custom"

    def __post_init__(self) -> None:
        for key in QUADRANTS:
            weight = getattr(self, key)
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"{key}={weight}: a weight must be a finite number above 0")
        if not 0 <= self.top_fraction <= 1:
            raise ValueError(f"top_fraction={self.top_fraction} is not between 0 and 1")
        if self.pool not in ("per_sign", "all"):
            raise ValueError(f"pool={self.pool!r} is neither 'per_sign' nor 'all'")

    @classmethod
    def o1(cls, W: float = 1.1, top_fraction: float = 0.1) -> ReweightRule:
        """STARE-O1: strengthen surprising tokens of good responses by W."""
        return cls(high_positive=W, top_fraction=top_fraction, name="o1")

    @classmethod
    def c2(cls, W: float = 1.1, M: float = 0.9, top_fraction: float = 0.1) -> ReweightRule:
        """STARE-C2: O1, and weaken surprising tokens of bad responses by M."""
        return cls(high_positive=W, high_negative=M, top_fraction=top_fraction, name="c2")

    @classmethod
    def four_quadrant(cls, *, M_low: float, M: float, top_fraction: float = 0.1) -> ReweightRule:
        """Weaken what lowers entropy: expected tokens of good responses, surprising ones of bad."""
        return cls(
            low_positive=M_low, high_negative=M, top_fraction=top_fraction, pool="all", name="four_quadrant"
        )

    @classmethod
    def custom(
        cls,
        *,
        high_positive: float = 1.0,
        low_positive: float = 1.0,
        high_negative: float = 1.0,
        low_negative: float = 1.0,
        top_fraction: float = 0.1,
        pool: Pool = "per_sign",
    ) -> ReweightRule:
        """Any four weights, either pool."""
        return cls(high_positive, low_positive, high_negative, low_negative, top_fraction, pool)

    @property
    def is_identity(self) -> bool:
        """True when every weight is 1: reweighting would change nothing."""
        return all(getattr(self, key) == 1 for key in QUADRANTS)

    def with_strength(self, W: float, M: float) -> ReweightRule:
        """The same rule with other W and M; ValueError for rules that are not made of W and M."""
        if self.name == "o1":
            return ReweightRule.o1(W, self.top_fraction)
        if self.name == "c2":
            return ReweightRule.c2(W, M, self.top_fraction)
        raise ValueError(f"the rule {self.name!r} has fixed weights; only 'o1' and 'c2' have W and M to move")

    def with_intensity(self, intensity: float) -> ReweightRule:
        """The same selection with every weight w faded to 1 + intensity * (w - 1); intensity in [0, 1]."""
        if not 0 <= intensity <= 1:
            raise ValueError(f"intensity={intensity} is not between 0 and 1")
        if intensity == 1:
            return self  # 1 + (w - 1) is not always w
        return replace(self, **{key: 1 + intensity * (getattr(self, key) - 1) for key in QUADRANTS})


@dataclass(frozen=True)
class Thresholds:
    """Where "high" begins in each pool of a step; equal on all ranks.

    Tensors of shape [S] on the device of the surprisals: S = 2 (advantage above,
    below zero) for pool "per_sign", S = 1 for "all".
    """

    pool: Pool
    top_fraction: float
    value: Tensor  # float32, nats: surprisal of the last token that is high; +inf if none is
    count: Tensor  # int64: tokens in the pool, over all ranks
    k: Tensor  # int64: how many of them are high
    above: Tensor  # int64: tokens strictly above `value`
    tied: Tensor  # int64: tokens exactly at `value`, which share the k - above places left
    at_value: Tensor | None = None  # float64: what `tie_share` says where `value` is not this step's quantile

    def tie_share(self) -> Tensor:
        """[S] float64 in [0, 1]: the part of the high weight that a token exactly at `value` gets."""
        if self.at_value is not None:
            return self.at_value
        return (self.k - self.above).double() / self.tied.clamp(min=1)


@torch.no_grad()
def surprisal_thresholds(
    surprisal: Tensor,
    advantage: Tensor,
    mask: Tensor,
    rule: ReweightRule,
    group: dist.ProcessGroup | None = None,
) -> Thresholds:
    """Find the surprisal from which tokens are "high", over the global batch.

    k = ceil(P * n) for a pool of n tokens, and at least 1 if n > 0 and P > 0. P is
    taken as the decimal number it was written as (up to 9 digits), so 7 % of 100
    tokens are 7; in floating point 0.07 * 100 is a little more than 7 and its
    ceiling 8. The published code computes in floating point: for such P and n it
    selects one token more.

    Collective over `group`: every rank calls it once a step, also one without tokens.

    Args:
        surprisal: -log-prob in nats, any floating dtype, compared as float32. Values
            down to -1e-3 count as 0 (rounding); +inf is the highest.
        advantage: shaped like `surprisal`.
        mask: shaped like `surprisal`, bool or 0/1: tokens that the policy wrote. What
            the other tensors hold outside it does not matter.
        rule: gives top_fraction and pool.
        group: the ranks that share the batch (DP x CP); None for this process alone.

    Raises:
        ValueError: unequal shapes; or, on every rank alike, a masked token anywhere
            whose surprisal is NaN or negative, or whose advantage is not finite.
    """
    check_shapes(surprisal, advantage, mask)
    s, a, m = surprisal.reshape(-1), advantage.reshape(-1), mask.reshape(-1)

    def members(part: slice) -> list[Tensor]:
        inside = m[part] != 0
        if rule.pool == "all":
            return [inside]
        return [inside & (a[part] > 0), inside & (a[part] < 0)]

    def faults(part: slice) -> dict[str, Tensor]:
        inside = m[part] != 0
        return {
            **value_faults(s[part], inside, "surprisal"),
            # Three times as fast as isfinite() on a CPU; false for NaN too.
            "advantage is not finite": inside & ~(a[part].abs() < math.inf),
        }

    share = Fraction(repr(float(rule.top_fraction))).limit_denominator(10**9)  # products fit 64 bits

    def choose_k(count: Tensor) -> Tensor:
        k = (share.numerator * count + share.denominator - 1) // share.denominator
        return k.clamp(min=1).minimum(count) if rule.top_fraction > 0 else torch.zeros_like(count)

    found = kth_largest(s, members, choose_k, group=group, faults=faults)
    return Thresholds(
        rule.pool, rule.top_fraction, found.value, found.count, found.k, found.above, found.tied
    )


@torch.no_grad()
def token_weights(
    surprisal: Tensor,
    advantage: Tensor,
    mask: Tensor,
    rule: ReweightRule,
    group: dist.ProcessGroup | None = None,
    thresholds: Thresholds | None = None,
) -> Tensor:
    """The weight of each token's clipped objective: float32, shaped like `surprisal`.

    1 outside the mask and where the advantage is 0. Tokens that tie exactly at the
    threshold share the places left: each gets low + (high - low) * places / tied.
    So the weights depend neither on the order of tokens nor on the layout, to the bit.

    Without `thresholds` this is collective over `group`, as `surprisal_thresholds`
    is, and the tensors must be this rank's whole share of the batch. With them
    nothing is communicated, and a single microbatch may be given.

    Raises:
        ValueError: as `surprisal_thresholds`; or thresholds made for another pool or fraction.
    """
    check_shapes(surprisal, advantage, mask)
    if thresholds is None:
        thresholds = surprisal_thresholds(surprisal, advantage, mask, rule, group)
    elif (thresholds.pool, thresholds.top_fraction) != (rule.pool, rule.top_fraction):
        raise ValueError(
            f"thresholds are for pool={thresholds.pool!r}, top_fraction={thresholds.top_fraction}; "
            f"the rule has pool={rule.pool!r}, top_fraction={rule.top_fraction}"
        )

    # Three levels (low, tied, high) for each sign: a table of six weights.
    low = surprisal.new_tensor([rule.low_positive, rule.low_negative], dtype=torch.float64)
    high = surprisal.new_tensor([rule.high_positive, rule.high_negative], dtype=torch.float64)
    tied = torch.lerp(low, high, thresholds.tie_share().expand(2))
    table = torch.stack([low, tied, high], dim=1).float()
    limit = order_bits(thresholds.value).expand(2)

    weights = torch.ones(surprisal.numel(), dtype=torch.float32, device=surprisal.device)
    s, a, m = surprisal.reshape(-1), advantage.reshape(-1), mask.reshape(-1)
    for part in slices(s.numel(), s.device):
        bits, negative = order_bits(s[part]), (a[part] < 0).long()
        level = (bits >= limit[negative]).long() + (bits > limit[negative]).long()
        reweighted = (m[part] != 0) & (a[part] != 0)
        weights[part] = torch.where(reweighted, table[negative, level], 1.0)
    return weights.view(surprisal.shape)


@torch.no_grad()
def weight_sums(weights: Tensor, advantage: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What reweighting did to these tokens: float64 sums, to be added over microbatches and ranks.

    tokens, positive, negative: masked tokens, those with A > 0, with A < 0. raised,
    lowered: tokens with a weight above, below 1. weight: sum of weights.
    abs_advantage, weighted_abs_advantage: sums of |A| and of weight * |A|.
    """
    check_shapes(weights, advantage, mask)
    inside = mask != 0
    size = torch.where(inside, advantage, 0).abs()
    sums = {
        "tokens": inside,
        "positive": inside & (advantage > 0),
        "negative": inside & (advantage < 0),
        "raised": inside & (weights > 1),
        "lowered": inside & (weights < 1),
        "weight": torch.where(inside, weights, 0),
        "abs_advantage": size,
        "weighted_abs_advantage": size * torch.where(inside, weights, 1),
    }
    return {name: tensor.sum(dtype=torch.float64) for name, tensor in sums.items()}


@torch.no_grad()
def high_share(surprisal: Tensor, advantage: Tensor, thresholds: Thresholds) -> Tensor:
    """How much each token is "high": 1 above its threshold, 0 below, `tie_share` exactly at it; float64."""
    negative = (advantage < 0).long()
    limit = order_bits(thresholds.value).expand(2)[negative]
    bits = order_bits(surprisal)
    tied = thresholds.tie_share().expand(2)[negative]
    return torch.where(bits > limit, 1.0, torch.where(bits == limit, tied, 0.0))


def check_shapes(first: Tensor, advantage: Tensor, mask: Tensor) -> None:
    """ValueError unless all three are shaped alike."""
    if not first.shape == advantage.shape == mask.shape:
        raise ValueError(
            f"shapes differ: tokens {tuple(first.shape)}, advantage {tuple(advantage.shape)}, "
            f"mask {tuple(mask.shape)}"
        )
