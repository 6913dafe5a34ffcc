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
BAND = {"H_min": 0.2, "H_max": 0.5}
CONFIGS += [
    GateConfig(mode="intensity", schedule=schedule, rule=C2, alpha=0.03)
    for schedule in ("fixed", "sign", "pi")
]
CONFIGS += [
    GateConfig(mode="band", rule=C2, **BAND),
    GateConfig(mode="band", rule=C2, schedule="pi", target_entropy=0.15, **BAND),
    GateConfig(rule=C2, target_entropy="auto", auto_steps=3),
    GateConfig(rule=C2, mode="off", schedule="pi", target_entropy="auto", auto_steps=3),
    GateConfig(rule=C2, mode="intensity", schedule="sign", target_entropy="auto", auto_steps=3),
]
any_entropy = st.one_of(st.floats(1e-3, 3), st.sampled_from([0.3, math.nan, math.inf, -math.inf]))


def figures(decision) -> tuple:
    return (
        decision.rule, decision.open, decision.W, decision.M, decision.intensity, decision.advantage_factor,
        decision.nonfinite,
    )  # fmt: skip


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
            assert figures(decision)[:-1] == figures(seen)[:-1]
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
@given(
    entropies=st.lists(any_entropy, max_size=20),
    at=st.integers(0, 20),
    number=st.integers(0, len(CONFIGS) - 1),
)
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
        ({"target_entropy": "automatic"}, "neither a number nor 'auto'"),
        ({"target_entropy": "auto", "auto_steps": 0}, "auto_steps=0"),
        ({"target_entropy": "auto", "auto_fraction": 1.5}, "auto_fraction=1.5"),
        ({"target_entropy": "auto", "mode": "off"}, "used by nothing: mode='off'"),
        ({"target_entropy": "auto", "mode": "band", **BAND}, "used by nothing: mode='band' with its own"),
        ({"mode": "band", "H_min": 0.2}, "give both or neither"),
        ({"mode": "intensity", "H_min": 0.5, "H_max": 0.5}, "H_min=0.5, H_max=0.5"),
        ({"mode": "band", "H_min": 0.0, "H_max": 0.5}, "H_min=0.0"),
        ({"mode": "band", "g_min": 0.0}, "g_min=0.0"),
        ({"mode": "band", "g_max": 0.9}, "g_max=0.9"),
        ({"mode": "band", "ramp": 0.0}, "ramp=0.0"),
        ({"mode": "band", "ramp": 0.3, **BAND}, "ramp=0.3 is above H_min=0.2"),
        ({"mode": "band", "ramp": 0.1, "target_entropy": "auto"}, "ramp=0.1 needs an H_min"),
        ({"mode": "band", "schedule": "sign"}, "reweights only below H_min, 0.667 of the target"),
        ({"mode": "band", "schedule": "pi", "target_entropy": "auto"}, "only below H_min, 0.667 of"),
        ({"mode": "intensity", "schedule": "pi", "target_entropy": 0.6, **BAND}, "only below H_max=0.5"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings_: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GateConfig(**settings_)


def sweep(config: GateConfig, entropies) -> list:
    """The decision of a fresh gate for each entropy."""
    return [EntropyGate(config).update(entropy) for entropy in entropies]


GRID = [i / 1000 for i in range(-50, 1501)]


def largest_kink(values: list[float]) -> float:
    """The largest change of slope between neighbours of the grid; about 1 where a slope jumps by 1."""
    slopes = [(b - a) * 1000 for a, b in zip(values, values[1:], strict=False)]
    return max(abs(b - a) for a, b in zip(slopes, slopes[1:], strict=False))


def test_intensity_fades_the_rule_in_as_entropy_falls_through_the_band() -> None:
    decisions = sweep(GateConfig(mode="intensity", rule=C2, **BAND), GRID)
    strength = [decision.intensity for decision in decisions]
    assert all(a >= b for a, b in zip(strength, strength[1:], strict=False))
    assert largest_kink(strength) < 0.2  # a straight ramp over 0.3 nats would have 3.3
    for entropy, decision in zip(GRID, decisions, strict=True):
        assert decision.advantage_factor == 1.0
        assert decision.open == (decision.intensity > 0)
        if entropy <= 0.2:
            assert decision.rule == C2  # to the bit
        elif entropy >= 0.5:
            assert decision.intensity == 0 and decision.rule is None
        else:
            assert 0 < decision.intensity < 1
            assert decision.rule.high_positive == pytest.approx(1 + decision.intensity * 0.1)
            assert decision.rule.high_negative == pytest.approx(1 - decision.intensity * 0.1)
            assert (decision.rule.low_positive, decision.rule.top_fraction) == (1, C2.top_fraction)
    assert sweep(GateConfig(mode="intensity", rule=C2, **BAND), [0.35])[0].intensity == pytest.approx(0.5)


def test_intensity_does_not_chatter() -> None:
    """Noise around the middle of the band moves the weights a little; the paper's gate throws them about."""
    noisy = [0.35 + 0.01 * (-1) ** i for i in range(20)]

    def jumps(config: GateConfig) -> float:
        rules = [decision.rule or ReweightRule.c2(1.0, 1.0) for decision in sweep(config, noisy)]
        return max(abs(a.high_positive - b.high_positive) for a, b in zip(rules, rules[1:], strict=False))

    assert jumps(GateConfig(rule=C2, target_entropy=0.35)) == pytest.approx(0.1)
    assert jumps(GateConfig(mode="intensity", rule=C2, **BAND)) < 0.011


def test_intensity_fades_the_weights_that_the_schedule_reached() -> None:
    config = GateConfig("intensity", "pi", C2, W_max=10.0, M_min=0.1, target_entropy=0.4, **BAND)
    gate = EntropyGate(config)
    decision = [gate.update(0.3) for _ in range(5)][-1]
    assert 1.1 < decision.W < 10 and 0.2 < decision.intensity < 0.9
    assert decision.rule.high_positive == pytest.approx(1 + decision.intensity * (decision.W - 1))
    assert decision.rule.high_negative == pytest.approx(1 + decision.intensity * (decision.M - 1))


def test_band_factor_has_its_shape() -> None:
    config = GateConfig(mode="band", rule=C2, g_min=0.4, g_max=1.5, ramp=0.1, **BAND)
    decisions = sweep(config, GRID)
    g = [decision.advantage_factor for decision in decisions]
    assert all(a <= b for a, b in zip(g, g[1:], strict=False))
    assert largest_kink(g) < 0.4  # a straight ramp would have 6
    for entropy, decision in zip(GRID, decisions, strict=True):
        factor = decision.advantage_factor
        if 0.2 <= entropy <= 0.5:
            assert factor == 1.0 and decision.rule is None and not decision.open  # plain GRPO
        elif entropy > 0.5:
            assert (factor > 1 or entropy < 0.501) and decision.rule is None
        else:
            assert factor < 1 and decision.open
        if entropy < 0.1 - 1e-9:
            assert factor == pytest.approx(0.4) and decision.rule == C2
        if entropy > 0.6 + 1e-9:
            assert factor == pytest.approx(1.5)
    assert sweep(config, [0.15, 0.55])[0].advantage_factor == pytest.approx(0.7)
    assert sweep(config, [0.15, 0.55])[1].advantage_factor == pytest.approx(1.25)


def test_a_band_lies_around_the_target_where_none_is_given() -> None:
    band = GateConfig(mode="band", target_entropy=0.3).band(0.3)
    assert (band.H_min, band.H_max, band.ramp) == pytest.approx((0.2, 0.5, 0.15))
    assert GateConfig(mode="band", H_min=0.1, H_max=0.9).band(0.3).ramp == 0.1  # no entropy lies below 0


@pytest.mark.parametrize("mode", ["target", "intensity", "band", "off"])
def test_auto_measures_first_and_then_does_as_if_the_target_had_been_given(mode: str) -> None:
    schedule = "pi" if mode == "off" else "fixed"
    measuring = {"target_entropy": "auto", "auto_steps": 3, "auto_fraction": 0.25}
    auto = GateConfig(mode, schedule, C2, smoothing=0.0, **measuring)
    gate = EntropyGate(auto)
    for entropy in (1.0, math.nan, 2.0, 3.0):
        decision = gate.update(entropy)
        assert decision.rule is None and not decision.open and decision.advantage_factor == 1
    assert not decision.measuring and decision.target_entropy == pytest.approx(0.5)
    given = EntropyGate(GateConfig(mode, schedule, C2, target_entropy=decision.target_entropy, smoothing=0.0))
    for entropy in (0.6, 0.45, 0.3, 0.1, 0.9, 0.4):
        assert figures(gate.update(entropy))[:-1] == figures(given.update(entropy))[:-1]


def test_auto_shows_in_the_metrics() -> None:
    gate = EntropyGate(GateConfig(target_entropy="auto", auto_steps=2))
    first, second = gate.update(1.0).metrics(), gate.update(0.8).metrics()
    assert first["stare/measuring_target"] == 1 and "stare/target_entropy" not in first
    assert second["stare/measuring_target"] == 0 and second["stare/target_entropy"] == pytest.approx(0.45)


def test_auto_refuses_a_start_without_entropy() -> None:
    gate = EntropyGate(GateConfig(target_entropy="auto", auto_steps=2))
    gate.update(0.0)
    with pytest.raises(ValueError, match="first 2 steps is 0.0"):
        gate.update(0.0)


def test_auto_refuses_a_target_that_lies_outside_what_the_mode_reweights() -> None:
    gate = EntropyGate(GateConfig("intensity", "pi", C2, "auto", auto_steps=2, **BAND))
    gate.update(1.2)
    with pytest.raises(ValueError, match=r"auto \(0.6\): .*only below H_max=0.5"):
        gate.update(1.2)


def settled_entropy(W_min: float) -> float:
    """Entropy after steps of a policy that reward alone no longer moves, started above the target."""
    gate = EntropyGate(
        GateConfig(mode="off", schedule="pi", rule=C2, target_entropy=0.5, W_max=10.0, M_min=0.1, W_min=W_min)
    )
    entropy = 0.8
    for _ in range(400):
        decision = gate.update(entropy)
        entropy += 0.01 * math.log(decision.W)
    return entropy


def test_pi_lowers_entropy_only_where_W_may_fall_below_one():
    assert settled_entropy(1.0) == 0.8
    assert settled_entropy(0.5) == pytest.approx(0.5, abs=0.01)


def test_pi_below_one_weighs_the_other_way_round():
    gate = EntropyGate(
        GateConfig(mode="off", schedule="pi", rule=C2, target_entropy=0.5, W_max=10.0, M_min=0.1, W_min=0.5)
    )
    decision = gate.update(1.0)
    weights = [decision.W, decision.M]
    assert weights == pytest.approx([0.5, 2.0])


@pytest.mark.parametrize("W_min", [0.0, -0.5, 1.5])
def test_W_min_out_of_range_is_refused(W_min):
    with pytest.raises(ValueError, match=f"W_min={W_min} is not in"):
        GateConfig(mode="off", schedule="pi", rule=C2, W_min=W_min)
