from __future__ import annotations

import json
import math
import statistics

import pytest
import torch

from megatron_stare.stare import ReweightRule, ThresholdEMA, surprisal_thresholds, token_weights

RULE = ReweightRule.c2(1.5, 0.5, 0.1)


def batch(seed: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    surprisal = -torch.rand(n, generator=generator).log()
    return surprisal, torch.randn(n, generator=generator), torch.ones(n)


def constant(value: float, advantage: float, n: int = 10):
    return torch.full((n,), value), torch.full((n,), advantage), torch.ones(n)


def test_smoothing_follows_its_definition_for_each_sign() -> None:
    ema, expected = ThresholdEMA(0.8), None
    for seed in range(10):
        own = surprisal_thresholds(*batch(seed, 40), RULE)
        smoothed = ema.update(own)
        new = own.value.double()
        expected = new if expected is None else 0.8 * expected + 0.2 * new
        torch.testing.assert_close(smoothed.value, expected.float(), rtol=1e-6, atol=0)
        for field in ("count", "k", "above", "tied"):
            assert torch.equal(getattr(smoothed, field), getattr(own, field))


def test_the_selection_is_all_tokens_at_or_above_the_smoothed_threshold() -> None:
    ema = ThresholdEMA(0.9)
    for seed in range(5):
        surprisal, advantage, mask = batch(seed, 50)
        smoothed = ema.update(surprisal_thresholds(surprisal, advantage, mask, RULE))
    surprisal[:2], advantage[0], advantage[1] = smoothed.value, 1.0, -1.0  # exactly at it
    weights = token_weights(surprisal, advantage, mask, RULE, thresholds=smoothed)
    limit = torch.where(advantage > 0, smoothed.value[0], smoothed.value[1])
    high = torch.where(advantage > 0, 1.5, 0.5)
    assert torch.equal(weights, torch.where(surprisal >= limit, high, 1.0))


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_first_step_and_no_decay_share_ties_as_exact_thresholds_do(decay: float) -> None:
    ema = ThresholdEMA(decay)
    for seed in range(4 if decay == 0 else 1):
        surprisal, advantage, mask = batch(seed, 60)
        surprisal = (surprisal * 3).round() / 3
        own = surprisal_thresholds(surprisal, advantage, mask, RULE)
        assert torch.equal(
            token_weights(surprisal, advantage, mask, RULE, thresholds=ema.update(own)),
            token_weights(surprisal, advantage, mask, RULE, thresholds=own),
        )


def test_an_empty_pool_and_an_infinite_quantile_keep_the_old_threshold() -> None:
    ema = ThresholdEMA(0.5)
    first = ema.update(surprisal_thresholds(*constant(2.0, 1.0), RULE))  # nothing has A < 0
    assert first.value.tolist() == [2.0, math.inf]
    second = ema.update(surprisal_thresholds(*constant(4.0, -1.0), RULE))  # nothing has A > 0
    assert second.value.tolist() == [2.0, 4.0]
    third = ema.update(surprisal_thresholds(*constant(math.inf, 1.0), RULE))
    assert third.value.tolist() == [2.0, 4.0]
    weights = token_weights(*constant(math.inf, 1.0), RULE, thresholds=third)
    assert (weights == 1.5).all()  # all lie above it
    assert ema.update(surprisal_thresholds(*constant(3.0, 1.0), RULE)).value.tolist() == [2.5, 4.0]


def test_smoothing_reduces_the_noise_of_small_batches() -> None:
    """At decay 0.9 the standard deviation falls by sqrt((1 - 0.9) / (1 + 0.9)) = 0.23."""
    ema, own, smoothed = ThresholdEMA(0.9), [], []
    for seed in range(400):
        thresholds = surprisal_thresholds(*batch(seed, 40), RULE)
        own.append(thresholds.value[0].item())
        smoothed.append(ema.update(thresholds).value[0].item())
    assert statistics.stdev(smoothed[50:]) < 0.4 * statistics.stdev(own[50:])
    assert statistics.mean(smoothed[50:]) == pytest.approx(statistics.mean(own[50:]), rel=0.05)


@pytest.mark.parametrize("rule", [RULE, ReweightRule.four_quadrant(M_low=0.9, M=0.9, top_fraction=0.1)])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_loaded_average_goes_on_as_if_nothing_had_happened(rule: ReweightRule, at: int) -> None:
    ema, resumed = ThresholdEMA(0.7), ThresholdEMA(0.7)
    for seed in range(at):
        ema.update(surprisal_thresholds(*batch(seed, 30), rule))
    resumed.load_state_dict(json.loads(json.dumps(ema.state_dict())))
    assert resumed.state_dict() == ema.state_dict()
    for seed in range(at, at + 3):
        thresholds = surprisal_thresholds(*batch(seed, 30), rule)
        assert torch.equal(resumed.update(thresholds).value, ema.update(thresholds).value)


def test_a_pool_without_a_threshold_survives_saving() -> None:
    ema, resumed = ThresholdEMA(0.5), ThresholdEMA(0.5)
    ema.update(surprisal_thresholds(*constant(2.0, 1.0), RULE))
    assert ema.state_dict()["value"] == [2.0, None]
    resumed.load_state_dict(ema.state_dict())
    assert resumed.update(surprisal_thresholds(*constant(4.0, -1.0), RULE)).value.tolist() == [2.0, 4.0]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="threshold_ema=1.0"):
        ThresholdEMA(1.0)
    ema = ThresholdEMA(0.5)
    ema.update(surprisal_thresholds(*batch(0, 30), RULE))
    with pytest.raises(ValueError, match="top_fraction=0.2; the average is of"):
        ema.update(surprisal_thresholds(*batch(0, 30), ReweightRule.o1(top_fraction=0.2)))
    with pytest.raises(ValueError, match=r"missing \['value'\], unknown \['values'\]"):
        ema.load_state_dict({"pool": "all", "top_fraction": 0.1, "values": []})
    with pytest.raises(ValueError, match="'all' with 2 values"):
        ema.load_state_dict({"pool": "all", "top_fraction": 0.1, "value": [1.0, 2.0]})
