"""What each advantage-surprisal quadrant holds, and how it is predicted to move entropy.

First-order analysis (arXiv 2606.19236, the token-level decomposition "advantage
times entropy sensitivity"; the covariance form is in arXiv 2505.22617). Take one
token's next-token distribution p = softmax(z), with s_j = -ln p_j and entropy
H = sum_j p_j s_j. Then

    dH/dz_j = p_j (s_j - H)                       since dp_i/dz_j = p_i (1[i=j] - p_j)

and ascent on w A ln p_y, which is GRPO's objective at ratio 1 without clipping,
moves the logits by eta w A (1[j=y] - p_j). The product is the change of H:

    dH = eta w A S(y),     S(y) = p_y (s_y - H) - sum_j p_j^2 (s_j - H).

S(y) is the *sensitivity*. It is above 0 for tokens that are surprising beside H
and below 0 for expected ones, and its expectation over y ~ p is exactly 0: this
is the near-criticality that lets a small reweighting steer the total. The sum
over j, called the *centre* here, is never above 0, because p_j falls as s_j rises.

What is left out: the centre, where it is not given (S is then too low for every
token by its absolute value, and its expectation is no longer 0); that tokens share
the network's parameters, so that a step for one moves the distributions of others; the
optimizer's preconditioning; clipping; and everything beyond first order. So the
figures compare quadrants and steps of one run; they do not forecast the next
entropy in nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stare.stare.quantile import slices
from megatron_stare.stare.reweight import QUADRANTS, Thresholds, check_shapes, high_share

_SUMS = ("tokens", "abs_advantage", "weight", "entropy_change", "grpo_entropy_change")


@torch.no_grad()
def entropy_sensitivity(surprisal: Tensor, entropy: Tensor, centre: Tensor | None = None) -> Tensor:
    """S(y) of each token, nats per unit step of the token's logits times advantage (module docstring).

    Args:
        surprisal: -ln p_y, nats; +inf gives the limit p_y s_y = 0.
        entropy: H of the distribution that the token was drawn from, nats; shaped alike.
        centre: sum_j p_j^2 (s_j - H) of that distribution; shaped alike. None leaves it out.

    Returns:
        float64, shaped alike.
    """
    s, H = surprisal.double(), entropy.double()
    direct = torch.where(s.isinf(), 0.0, torch.exp(-s) * (s - H))
    return direct if centre is None else direct - centre.double()


@torch.no_grad()
def sensitivity_centre(log_probs: Tensor) -> Tensor:
    """The centre sum_j p_j^2 (s_j - H) of full distributions: from log-probs [..., V] to [...]."""
    p = log_probs.exp()
    s = torch.where(p > 0, -log_probs, 0.0)
    H = (p * s).sum(dim=-1, keepdim=True)
    return (p.square() * (s - H)).sum(dim=-1)


@torch.no_grad()
def quadrant_sums(
    surprisal: Tensor,
    advantage: Tensor,
    mask: Tensor,
    thresholds: Thresholds,
    *,
    weights: Tensor | None = None,
    entropy: Tensor | None = None,
    centre: Tensor | None = None,
) -> dict[str, Tensor]:
    """Sums over these tokens, to be added over microbatches and ranks, then given to `quadrant_figures`.

    Talks to nobody. A token that ties at its threshold counts in part to the high and in
    part to the low quadrant, as its weight does, so the sums do not depend on the layout.
    Tokens whose advantage is 0 are in no quadrant, but in the total.

    Args:
        surprisal, advantage, mask: as for `token_weights`.
        thresholds: of the whole step.
        weights: w of each token; None: 1 everywhere (a closed gate).
        entropy: per-token entropy of the distributions, nats. Without it the predicted
            changes are left out.
        centre: see `entropy_sensitivity`.

    Returns:
        float64 scalars on the tensors' device: "tokens" and "abs_advantage" of all masked
        tokens, and for each quadrant Q ("high_positive", "low_positive", "high_negative",
        "low_negative") "Q/tokens", "Q/abs_advantage", "Q/weight" (sum of w),
        "Q/entropy_change" (sum of w A S) and "Q/grpo_entropy_change" (sum of A S).

    Raises:
        ValueError: unequal shapes.
    """
    for tensor in (advantage, weights, entropy, centre):
        if tensor is not None:
            check_shapes(surprisal, tensor, mask)
    kinds = _SUMS if entropy is not None else _SUMS[:3]
    totals = torch.zeros(2, dtype=torch.float64, device=surprisal.device)
    table = torch.zeros(len(QUADRANTS), len(kinds), dtype=torch.float64, device=surprisal.device)
    given = (surprisal, advantage, mask, weights, entropy, centre)
    flat = [None if tensor is None else tensor.reshape(-1) for tensor in given]
    for part in slices(surprisal.numel(), surprisal.device):
        s, a, m, w, H, c = (None if tensor is None else tensor[part] for tensor in flat)
        inside = m != 0
        a = torch.where(inside, a, 0).double()
        w = torch.ones_like(a) if w is None else torch.where(inside, w, 1).double()
        columns = [torch.ones_like(a), a.abs(), w]
        if H is not None:
            push = torch.where(inside, a * entropy_sensitivity(s, H, c), 0)
            columns += [w * push, push]
        share = torch.where(inside, high_share(s, a, thresholds), 0)
        positive, negative = (inside & (a > 0)).double(), (inside & (a < 0)).double()
        rows = [share * positive, (1 - share) * positive, share * negative, (1 - share) * negative]
        table += torch.stack(rows) @ torch.stack(columns, dim=1)
        totals += torch.stack([inside.sum(dtype=torch.float64), a.abs().sum()])
    sums = {"tokens": totals[0], "abs_advantage": totals[1]}
    for quadrant, row in zip(QUADRANTS, table, strict=True):
        sums |= {f"{quadrant}/{kind}": value for kind, value in zip(kinds, row, strict=True)}
    return sums


def quadrant_figures(sums: dict[str, float]) -> dict[str, float]:
    """From sums over the global batch to figures for the log, "stare/Q/..." for each quadrant Q.

    token_share and advantage_share: of all masked tokens, and of their summed |A|.
    mean_weight: mean w of the quadrant's tokens. entropy_change: sum of w A S over the number
    of all masked tokens (with unit step on each token's logits: nats of mean entropy);
    grpo_entropy_change: the same with w = 1. What has no tokens is left out.
    """
    figures: dict[str, float] = {}
    tokens, size = float(sums["tokens"]), float(sums["abs_advantage"])
    for quadrant in QUADRANTS:
        mine = {kind: float(sums[f"{quadrant}/{kind}"]) for kind in _SUMS if f"{quadrant}/{kind}" in sums}
        if tokens > 0:
            figures[f"stare/{quadrant}/token_share"] = mine["tokens"] / tokens
            for kind in _SUMS[3:]:
                if kind in mine:
                    figures[f"stare/{quadrant}/{kind}"] = mine[kind] / tokens
        if size > 0:
            figures[f"stare/{quadrant}/advantage_share"] = mine["abs_advantage"] / size
        if mine["tokens"] > 0:
            figures[f"stare/{quadrant}/mean_weight"] = mine["weight"] / mine["tokens"]
    return figures
