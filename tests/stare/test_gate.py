from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.stare import EntropyGate, GateConfig, ReweightRule

C2 = ReweightRule.c2(1.1, 0.9)
CONFIGS = [
    GateConfig(mode=mode, schedule=schedule, rule=C2, alpha=0.03)
    for mode in ("target", "off")
    for schedule in ("fixed", "sign", "pi")
]
any_entropy = st.one_of(st.floats(0, 3), st.sampled_from([0.3, math.nan, math.inf, -math.inf]))


def figures(decision) -> tuple:
    return (decision.rule, decision.open, decision.W, decision.M, decision.nonfinite)


def test_target_is_open_only_below_the_target() -> None:
    gate = EntropyGate(GateConfig(rule=C2, target_entropy=0.3))
    decisions = [gate.update(entropy) for entropy in (0.29, 0.3, 0.31, 0.0)]
    assert [decision.open for decision in decisions] == [True, False, False, True]
    assert [decision.rule for decision in decisions] == [C2, None, None, C2]


def test_off_is_always_open() -> None:
    gate = EntropyGate(GateConfig(mode="off", rule=C2))
    assert [gate.update(entropy).rule for entropy in (math.nan, 0.1, 5.0)] == [C2, C2, C2]


def test_a_rule_of_ones_is_plain_grpo() -> None:
    decision = EntropyGate(GateConfig(mode="off", rule=ReweightRule.o1(1.0))).update(0.1)
    assert decision.open and decision.rule is None


@settings(max_examples=100, deadline=None)
@given(entropies=st.lists(any_entropy, max_size=30), number=st.integers(0, len(CONFIGS) - 1))
def test_bounds_hold_and_bad_entropies_change_nothing(entropies: list[float], number: int) -> None:
    config = CONFIGS[number]
    with_bad, without_bad = EntropyGate(config), EntropyGate(config)
    seen = None
    for entropy in entropies:
        decision = with_bad.update(entropy)
        if math.isfinite(entropy):
            seen = without_bad.update(entropy)
        if seen is not None:
            assert figures(decision)[:4] == figures(seen)[:4]
        assert 1 <= decision.W <= config.W_max + 1e-12
        assert config.M_min <= decision.M <= 1
        assert decision.nonfinite == with_bad.state_dict()["nonfinite"]
        assert all(math.isfinite(value) for value in decision.metrics().values())
        assert all(name.startswith("stare/") for name in decision.metrics())
    assert with_bad.state_dict()["nonfinite"] == sum(not math.isfinite(e) for e in entropies)


@pytest.mark.parametrize(("mode", "is_open"), [("target", False), ("off", True)])
def test_before_the_first_finite_entropy(mode: str, is_open: bool) -> None:
    decision = EntropyGate(GateConfig(mode=mode, rule=C2)).update(math.nan)
    assert decision.open is is_open
    assert math.isnan(decision.smoothed_entropy)
    assert "stare/smoothed_entropy" not in decision.metrics()


@settings(max_examples=60, deadline=None)
@given(entropies=st.lists(any_entropy, max_size=20), at=st.integers(0, 20), number=st.integers(0, 5))
def test_a_saved_and_loaded_gate_goes_on_as_if_nothing_had_happened(entropies, at: int, number: int) -> None:
    gate, resumed = EntropyGate(CONFIGS[number]), EntropyGate(CONFIGS[number])
    for entropy in entropies[:at]:
        gate.update(entropy)
    resumed.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    assert resumed.state_dict() == gate.state_dict()
    for entropy in entropies[at:]:
        assert repr(resumed.update(entropy)) == repr(gate.update(entropy))  # repr: NaN equals NaN


def test_state_is_plain_numbers_and_a_foreign_one_is_refused() -> None:
    gate = EntropyGate(CONFIGS[2])
    gate.update(0.2)
    state = gate.state_dict()
    assert {type(value) for value in state.values()} == {int, float}
    with pytest.raises(ValueError, match=r"missing \['W'\], unknown \['w'\]"):
        gate.load_state_dict({**{k: v for k, v in state.items() if k != "W"}, "w": 1.0})


def test_a_fixed_schedule_keeps_the_weights_of_its_config() -> None:
    old = EntropyGate(GateConfig(rule=ReweightRule.c2(1.1, 0.9)))
    new = EntropyGate(GateConfig(rule=ReweightRule.c2(1.4, 0.6)))
    new.load_state_dict(old.state_dict())
    assert (new.update(0.1).W, new.update(0.1).M) == (1.4, 0.6)


def test_sign_does_not_move_at_the_target() -> None:
    gate = EntropyGate(GateConfig(schedule="sign", rule=C2, target_entropy=0.3))
    decision = gate.update(0.3)
    assert (decision.W, decision.M, decision.open) == (1.1, 0.9, False)


def test_pi_follows_its_definition() -> None:
    config = GateConfig(mode="off", schedule="pi", rule=C2, target_entropy=0.6, W_max=10.0, M_min=0.2)
    gate = EntropyGate(config)
    smoothed, integral = None, 0.0
    for entropy in [2.0, 1.0, 0.7, 0.55, 0.5, 0.58, 0.61, 0.6, 0.3, 0.1, 0.02, 0.0, 0.0, 0.9, 3.0, 0.6]:
        smoothed = entropy if smoothed is None else 0.7 * smoothed + 0.3 * entropy
        error = (0.6 - smoothed) / 0.6
        u, limit = 4 * error + integral, math.log(10)
        if not (u > limit and error > 0 or u < 0 and error < 0):
            integral = min(max(integral + 0.5 * error, 0), limit)
        u = min(max(4 * error + integral, 0), limit)
        decision = gate.update(entropy)
        assert decision.smoothed_entropy == pytest.approx(smoothed)
        assert pytest.approx(math.exp(u)) == decision.W
        assert pytest.approx(max(0.2, math.exp(-u))) == decision.M
        assert decision.rule == (ReweightRule.c2(decision.W, decision.M) if u > 0 else None)


def test_pi_holds_a_plant_that_fixed_weights_do_not() -> None:
    """Entropy that decays by itself and is pushed up by ln W: the integral finds the push that is needed."""
    config = GateConfig(mode="off", schedule="pi", rule=C2, target_entropy=0.6, W_max=10.0, M_min=0.1)
    gate, entropy, late = EntropyGate(config), 2.0, []
    for step in range(300):
        decision = gate.update(entropy)
        entropy *= math.exp(-0.05 + 0.05 * math.log(decision.W))
        late += [entropy] if step > 150 else []
    assert max(abs(value / 0.6 - 1) for value in late) < 0.15


def test_anti_windup_lets_go_at_once() -> None:
    config = GateConfig(mode="off", schedule="pi", rule=C2, target_entropy=0.6, W_max=2.0, smoothing=0.0)
    gate = EntropyGate(config)
    for _ in range(500):
        assert pytest.approx(2.0) == gate.update(0.0).W
    assert [gate.update(1.2).W for _ in range(2)][-1] == pytest.approx(1.0)


def test_o1_leaves_bad_responses_alone_under_every_schedule() -> None:
    for schedule in ("fixed", "sign", "pi"):
        gate = EntropyGate(GateConfig(mode="off", schedule=schedule, rule=ReweightRule.o1(1.1)))
        decision = [gate.update(0.05) for _ in range(5)][-1]
        assert decision.M == 1.0 and decision.rule.high_negative == 1.0 and decision.W >= 1.1


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"mode": "intensify"}, "mode='intensify'"),
        ({"schedule": "pid"}, "schedule='pid'"),
        ({"target_entropy": 0.0}, "target_entropy=0.0"),
        ({"target_entropy": math.nan}, "target_entropy=nan"),
        ({"smoothing": 1.0}, "smoothing=1.0"),
        ({"M_min": 0.0}, "M_min=0.0"),
        ({"W_max": 0.9}, "W_max=0.9"),
        ({"alpha": -0.1}, "alpha=-0.1"),
        ({"schedule": "sign", "rule": ReweightRule.o1(2.0)}, "W=2.0 is not in"),
        ({"schedule": "pi", "kp": 0.0, "ki": 0.0}, "would never move"),
        ({"schedule": "pi", "rule": ReweightRule.custom(high_positive=1.2)}, "custom"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings_: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GateConfig(**settings_)
