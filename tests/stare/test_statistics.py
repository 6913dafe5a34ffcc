"""The quadrants: what they hold, and that entropy truly moves the way the first-order analysis says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_stare.stare import (
    ReweightRule,
    Thresholds,
    entropy_sensitivity,
    quadrant_figures,
    quadrant_sums,
    sensitivity_centre,
    surprisal_thresholds,
    token_weights,
)
from megatron_stare.stare.reweight import QUADRANTS, high_share

RULE = ReweightRule.c2(1.5, 0.5, 0.2)
RAISES = {"high_positive": True, "low_positive": False, "high_negative": False, "low_negative": True}


class Policy(torch.nn.Module):
    """A softmax policy over V tokens in C contexts; with `hidden`, contexts share a network."""

    def __init__(self, contexts: int, vocabulary: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()

        def parameter(*shape: int, scale: float) -> torch.nn.Parameter:
            values = torch.randn(*shape, dtype=torch.float64, generator=generator)
            return torch.nn.Parameter(values * scale)

        width = hidden or vocabulary
        self.table = parameter(contexts, width, scale=1.0 if hidden else 1.5)
        self.output = parameter(width, vocabulary, scale=1.5 / math.sqrt(hidden)) if hidden else None

    def log_probs(self) -> Tensor:
        """[C, V]"""
        logits = self.table if self.output is None else self.table.tanh() @ self.output
        return logits.log_softmax(dim=-1)


def sample(policy: Policy, generator: torch.Generator, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A context, a token drawn from the policy there, and an advantage of either sign, independent of it."""
    with torch.no_grad():
        probabilities = policy.log_probs().exp()
    context = torch.arange(tokens) % len(probabilities)
    token = torch.multinomial(probabilities[context], 1, generator=generator).squeeze(1)
    advantage = torch.randn(tokens, dtype=torch.float64, generator=generator)
    return context, token, advantage


def entropy_of(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def true_changes(policy: Policy, context: Tensor, token: Tensor, advantage: Tensor, parts) -> list[float]:
    """By autograd: gradient of the mean entropy, dot the GRPO update direction of some of the tokens."""
    parameters = list(policy.parameters())

    def gradient(scalar: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(scalar, parameters)])

    entropy_gradient = gradient(entropy_of(policy.log_probs())[context].mean())
    changes = []
    for part in parts:
        objective = (part * advantage * policy.log_probs()[context, token]).sum()
        changes.append(torch.dot(entropy_gradient, gradient(objective)).item())
    return changes


def parts_of(surprisal: Tensor, advantage: Tensor, thresholds: Thresholds) -> list[Tensor]:
    """Membership in each quadrant, in the order of QUADRANTS."""
    high = high_share(surprisal, advantage, thresholds)
    positive, negative = (advantage > 0).double(), (advantage < 0).double()
    return [high * positive, (1 - high) * positive, high * negative, (1 - high) * negative]


@pytest.mark.parametrize("hidden", [0, 24], ids=["free logits", "shared parameters"])
@pytest.mark.parametrize("seed", range(6))
def test_each_quadrant_moves_entropy_the_way_the_analysis_says(seed: int, hidden: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy = Policy(contexts=12, vocabulary=20, hidden=hidden, generator=generator)
    context, token, advantage = sample(policy, generator, tokens=6000)
    with torch.no_grad():
        surprisal = -policy.log_probs()[context, token]
    thresholds = surprisal_thresholds(surprisal, advantage, torch.ones(6000), RULE)
    changes = true_changes(policy, context, token, advantage, parts_of(surprisal, advantage, thresholds))
    assert {q: change > 0 for q, change in zip(QUADRANTS, changes, strict=True)} == RAISES
    # Near-criticality: what the quadrants do nearly cancels.
    assert abs(sum(changes)) < 0.1 * sum(abs(change) for change in changes)


@pytest.mark.parametrize("seed", range(4))
def test_reweighting_by_c2_raises_what_grpo_does_to_entropy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy = Policy(contexts=12, vocabulary=20, hidden=24, generator=generator)
    context, token, advantage = sample(policy, generator, tokens=3000)
    with torch.no_grad():
        surprisal = -policy.log_probs()[context, token]
    weights = token_weights(surprisal, advantage, torch.ones(3000), RULE).double()
    plain, steered = true_changes(policy, context, token, advantage, [torch.ones(3000), weights])
    assert steered > plain


@pytest.mark.parametrize("seed", range(3))
def test_the_prediction_with_the_centre_is_the_true_change_of_free_logits(seed: int) -> None:
    """One token a context, so that a token's step moves its own distribution only."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 400
    policy = Policy(contexts=tokens, vocabulary=20, hidden=0, generator=generator)
    context, token, advantage = sample(policy, generator, tokens)
    with torch.no_grad():
        log_probs = policy.log_probs()
    surprisal, mask = -log_probs[context, token], torch.ones(tokens)
    thresholds = surprisal_thresholds(surprisal, advantage, mask, RULE)
    weights = token_weights(surprisal, advantage, mask, RULE)
    sums = quadrant_sums(
        surprisal,
        advantage,
        mask,
        thresholds,
        weights=weights,
        entropy=entropy_of(log_probs),
        centre=sensitivity_centre(log_probs),
    )
    parts = parts_of(surprisal, advantage, thresholds)
    true = true_changes(policy, context, token, advantage, [*parts, *(part * weights for part in parts)])
    figures = quadrant_figures(sums)
    grpo = [figures[f"stare/{q}/grpo_entropy_change"] for q in QUADRANTS]
    steered = [figures[f"stare/{q}/entropy_change"] for q in QUADRANTS]
    assert [*grpo, *steered] == pytest.approx(true, rel=1e-9)


def test_sensitivity_is_zero_on_average_and_has_the_sign_of_surprise() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = (2 * torch.randn(50, 30, dtype=torch.float64, generator=generator)).log_softmax(dim=-1)
    entropy, centre = entropy_of(log_probs), sensitivity_centre(log_probs)
    assert (centre <= 0).all()
    every = entropy_sensitivity(-log_probs, entropy[:, None].expand(50, 30), centre[:, None].expand(50, 30))
    torch.testing.assert_close((log_probs.exp() * every).sum(dim=-1), torch.zeros(50, dtype=torch.float64))
    assert (every[-log_probs > entropy[:, None]] > 0).all()
    assert (every.gather(1, log_probs.argmax(dim=-1, keepdim=True)) < 0).all()
    # Without the centre every token is rated lower.
    assert (entropy_sensitivity(-log_probs, entropy[:, None].expand(50, 30)) <= every).all()


def test_an_impossible_token_and_a_certain_one_have_no_direct_term() -> None:
    surprisal = torch.tensor([math.inf, 0.0])
    assert entropy_sensitivity(surprisal, torch.tensor([1.0, 0.0])).tolist() == [0.0, 0.0]
    certain = torch.tensor([[0.0, -math.inf]])
    assert sensitivity_centre(certain).tolist() == [0.0]


def ties(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    surprisal = (-torch.rand(n, generator=generator).log() * 3).round() / 3
    advantage = torch.randint(-2, 3, (n,), generator=generator).float()
    return surprisal, advantage, torch.rand(n, generator=generator) < 0.8


def test_figures_follow_their_definitions() -> None:
    surprisal, advantage, mask = ties(0, 500)
    entropy = torch.rand(500)
    weights = token_weights(surprisal, advantage, mask, RULE)
    thresholds = surprisal_thresholds(surprisal, advantage, mask, RULE)
    sums = quadrant_sums(surprisal, advantage, mask, thresholds, weights=weights, entropy=entropy)
    figures = quadrant_figures({name: value.item() for name, value in sums.items()})

    # k = ceil(P n), ties shared: exact whatever ties there are.
    for sign, name in ((1, "positive"), (-1, "negative")):
        n = int((mask & (advantage * sign > 0)).sum())
        k = math.ceil(0.2 * n)
        assert sums[f"high_{name}/tokens"].item() == pytest.approx(k)
        assert sums[f"low_{name}/tokens"].item() == pytest.approx(n - k)
        assert figures[f"stare/high_{name}/token_share"] == pytest.approx(k / int(mask.sum()))
    shares = sum(figures[f"stare/{q}/advantage_share"] for q in QUADRANTS)
    assert shares == pytest.approx(1)
    total = sum(sums[f"{q}/weight"].item() for q in QUADRANTS)
    assert total == pytest.approx(weights[mask & (advantage != 0)].sum().item())
    change = advantage.double() * (-surprisal.double()).exp() * (surprisal.double() - entropy)
    assert sum(figures[f"stare/{q}/grpo_entropy_change"] for q in QUADRANTS) == pytest.approx(
        (change * mask).sum().item() / int(mask.sum())
    )
    assert sum(figures[f"stare/{q}/entropy_change"] for q in QUADRANTS) == pytest.approx(
        (change * weights * mask).sum().item() / int(mask.sum())
    )


def test_sums_add_up_over_microbatches_and_ignore_what_the_mask_hides() -> None:
    surprisal, advantage, mask = ties(1, 300)
    entropy = torch.rand(300)
    thresholds = surprisal_thresholds(surprisal, advantage, mask, RULE)
    whole = quadrant_sums(surprisal, advantage, mask, thresholds, entropy=entropy)
    for tensor in (surprisal, advantage, entropy):
        tensor[~mask] = math.nan
    pieces = [
        quadrant_sums(surprisal[i::3], advantage[i::3], mask[i::3], thresholds, entropy=entropy[i::3])
        for i in range(3)
    ]
    for name, value in whole.items():
        assert sum(piece[name].item() for piece in pieces) == pytest.approx(value.item(), abs=1e-9)


def test_an_empty_batch_has_no_figures_and_unequal_shapes_are_refused() -> None:
    nothing = torch.empty(0)
    thresholds = surprisal_thresholds(nothing, nothing, nothing, RULE)
    assert quadrant_figures(quadrant_sums(nothing, nothing, nothing, thresholds)) == {}
    with pytest.raises(ValueError, match="shapes differ"):
        quadrant_sums(nothing, nothing, nothing, thresholds, entropy=torch.ones(1))
