"""The general loss against a loop written from the papers, and what must hold for every kind."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.objective import ObjectiveSpec, PolicyLoss, TokenTerms, objective_loss, policy_loss
from megatron_stare.stare import EntropyGate, GateConfig, ReweightRule, token_weights

KINDS = ["ppo_clip", "gspo", "gspo_token", "cispo", "unclipped"]
SEQUENCES = 6

Batch = dict[str, object]


def random_batch(seed: int, n: int = 48, dtype=torch.float64, spread: float = 0.5) -> Batch:
    """Every input there is. Sequences have unequal lengths, and one has no masked token."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(n, generator=g, dtype=dtype)  # noqa: E731
    new = torch.rand(n, generator=g, dtype=dtype).log()
    sequence = torch.randint(0, SEQUENCES, (n,), generator=g).sort().values
    mask = (torch.rand(n, generator=g) < 0.8) & (sequence != 2)
    a = torch.randint(-2, 3, (SEQUENCES,), generator=g).to(dtype)[sequence]
    return {
        "log_probs": new.requires_grad_(),
        "entropy": torch.rand(n, generator=g, dtype=dtype).requires_grad_(),
        "old_log_probs": new.detach() + spread * normal(),
        "advantages": a,
        "mask": mask,
        "sequence": sequence,
        "weights": 0.5 + torch.rand(n, generator=g, dtype=dtype),
        "sampler_log_probs": new.detach() + spread * normal(),
        "reference_log_probs": new.detach() + spread * normal(),
        "terms": TokenTerms(
            weight=(torch.rand(n, generator=g) < 0.5).to(dtype),
            advantage=torch.rand(n, generator=g, dtype=dtype),
            kl_coef=torch.rand(n, generator=g, dtype=dtype) * (torch.rand(n, generator=g) < 0.3),
        ),
        "multipliers": torch.rand(n, generator=g, dtype=dtype),
    }


def naive(spec: ObjectiveSpec, b: Batch) -> torch.Tensor:
    """Sequence by sequence and token by token; gradients by autograd through scalars, constants as floats."""
    constant = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    total = constant(0.0)
    lists = {k: v.detach().tolist() for k, v in b.items() if isinstance(v, torch.Tensor)}
    terms = {k: v.tolist() for k, v in b["terms"].items()} if b["terms"] is not None else {}
    low, high = 1 - spec.clip_low, 1 + spec.clip_high
    for s in range(SEQUENCES):
        tokens = [t for t in range(len(lists["mask"])) if lists["sequence"][t] == s and lists["mask"][t]]
        if not tokens:
            continue
        logs = {t: b["log_probs"][t] - lists["old_log_probs"][t] for t in tokens}
        s_ratio = (sum(logs.values()) / len(tokens)).exp()
        product = math.exp(sum(lists["old_log_probs"][t] - lists["sampler_log_probs"][t] for t in tokens))
        for t in tokens:
            a = lists["advantages"][t] + terms.get("advantage", {t: 0.0})[t]
            pi = b["log_probs"][t].exp()
            rho = {
                "gspo": s_ratio,
                "gspo_token": s_ratio.item() * pi / pi.item(),
            }.get(spec.loss, logs[t].exp())
            if spec.loss == "cispo":
                factor = min(max(rho.item(), low), high)
                if a < 0 and spec.dual_clip is not None:
                    factor = min(factor, spec.dual_clip)
                j = factor * a * b["log_probs"][t]
            else:
                candidates = [rho * a]
                if spec.loss != "unclipped":
                    inside = low <= rho.item() <= high
                    clipped = rho if inside else constant(min(max(rho.item(), low), high))
                    candidates.append(clipped * a)
                j = min(candidates, key=lambda x: x.item())
                if a < 0 and spec.dual_clip is not None and j.item() < spec.dual_clip * a:
                    j = constant(spec.dual_clip * a)
            if spec.correction != "none":
                ratio = math.exp(lists["old_log_probs"][t] - lists["sampler_log_probs"][t])
                ratio = product if spec.correction_level == "sequence" else ratio
                if spec.correction == "truncate":
                    j = j * min(ratio, spec.correction_cap)
                else:
                    j = j * (ratio if spec.correction_floor <= ratio <= spec.correction_cap else 0.0)
            if b["weights"] is not None:
                j = j * lists["weights"][t]
            j = j * terms.get("weight", {t: 1.0})[t]
            d = b["log_probs"][t] - lists["reference_log_probs"][t]
            j = j - spec.kl_coef * {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() + d - 1}[spec.kl_estimator]
            old_kl = logs[t].abs() if spec.old_kl == "abs" else logs[t] ** 2 / 2
            j = j - terms.get("kl_coef", {t: 0.0})[t] * old_kl
            j = j + spec.entropy_coef * b["entropy"][t]
            total = total - j * (lists["multipliers"][t] if b["multipliers"] is not None else 1.0)
    return total


def gradients(loss: torch.Tensor, b: Batch) -> list[torch.Tensor]:
    leaves = [b["log_probs"], b["entropy"]]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


specs = st.builds(
    ObjectiveSpec,
    loss=st.sampled_from(KINDS),
    clip_low=st.sampled_from([0.0, 0.2, 0.5]),
    clip_high=st.sampled_from([0.0, 0.2, 0.28]),
    dual_clip=st.sampled_from([None, 1.1, 3.0]),
    kl_coef=st.sampled_from([0.0, 0.3]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    entropy_coef=st.sampled_from([0.0, 0.2]),
    old_kl=st.sampled_from(["abs", "k2"]),
    correction=st.sampled_from(["none", "truncate", "mask"]),
    correction_level=st.sampled_from(["token", "sequence"]),
    correction_cap=st.sampled_from([1.5, 4.0]),
)


@settings(max_examples=80, deadline=None)
@given(
    spec=specs,
    seed=st.integers(0, 2**31),
    left_out=st.sets(st.sampled_from(["weights", "terms", "multipliers"])),
)
def test_loss_and_gradients_follow_the_definition(spec: ObjectiveSpec, seed: int, left_out: set[str]) -> None:
    batch = {**random_batch(seed), **dict.fromkeys(left_out)}
    result = objective_loss(spec, **batch)
    expected = naive(spec, batch)
    assert result.loss_sum.item() == pytest.approx(expected.item(), rel=1e-10, abs=1e-10)
    if expected.requires_grad:
        for found, wanted in zip(gradients(result.loss_sum, batch), gradients(expected, batch), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    assert not any(value.requires_grad for value in result.metrics.values())


def before_the_general_form(log_probs, old, a, mask, weights, low, high, c) -> torch.Tensor:
    """The clipped loss as the trainer first had it, operation by operation."""
    inside = mask != 0
    new, old, a = (torch.where(inside, x, 0) for x in (log_probs, old, a))
    ratio = (new - old).clamp(-20.0, 20.0).exp()
    objective = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
    objective = torch.where(a < 0, torch.maximum(objective, c * a), objective)
    if weights is not None:
        objective = objective * torch.where(inside, weights, 0)
    return torch.where(inside, -objective, 0).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_plain_grpo_is_bit_identical_to_the_clipped_loss(dtype: torch.dtype, weighted: bool) -> None:
    batch = random_batch(1, 3000, dtype)
    weights = batch["weights"] if weighted else None
    arguments = (batch["log_probs"], batch["old_log_probs"], batch["advantages"], batch["mask"], weights)
    spec = ObjectiveSpec(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    general = objective_loss(spec, arguments[0], None, *arguments[1:4], weights=weights)
    simple = policy_loss(*arguments, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    expected = before_the_general_form(*arguments, 0.2, 0.28, 3.0)
    for result in (general, simple):
        assert torch.equal(result.loss_sum, expected)
        assert torch.equal(*(gradients(x, batch)[0] for x in (result.loss_sum, expected)))
    assert general.metrics == simple.metrics
    assert set(general.metrics) == {"ratio", "approx_kl", "clip_low", "clip_high", "dual_clip"}


def everything_on(kind: str) -> ObjectiveSpec:
    return ObjectiveSpec(
        loss=kind,
        clip_high=0.28,
        dual_clip=3.0,
        kl_coef=0.1,
        entropy_coef=0.01,
        correction="truncate",
        correction_level="sequence",
    )


SPECS = [spec for kind in KINDS for spec in (ObjectiveSpec(loss=kind), everything_on(kind))]
for_every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.loss}-{s.correction}")


@for_every_spec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_bit_identical_to_ones(spec: ObjectiveSpec, dtype: torch.dtype) -> None:
    """Weights, multipliers and terms that are not there, against those that change nothing."""
    batch = random_batch(2, 2000, dtype)
    ones = torch.ones(2000)
    neutral = {"weights": ones, "multipliers": ones, "terms": TokenTerms(weight=ones)}
    absent = objective_loss(spec, **{**batch, **dict.fromkeys(neutral)})
    for name, value in neutral.items():
        present = objective_loss(spec, **{**batch, **dict.fromkeys(neutral), name: value})
        assert torch.equal(present.loss_sum, absent.loss_sum)
        for a, b in zip(gradients(present.loss_sum, batch), gradients(absent.loss_sum, batch), strict=True):
            assert torch.equal(a, b)
        assert {k: present.metrics[k] for k in absent.metrics} == absent.metrics


@for_every_spec
def test_with_a_closed_gate_the_gradients_are_those_without_stare_bit_for_bit(
    spec: ObjectiveSpec,
) -> None:
    """What the trainer does with the gate's decision; and a rule whose weights are all 1."""
    decision = EntropyGate(GateConfig(target_entropy=0.3)).update(0.5)
    assert decision.rule is None
    found: list[list[torch.Tensor]] = []
    for rule in (None, decision.rule, ReweightRule.custom()):
        batch = random_batch(3, 2000, torch.float32)
        signal = (-batch["old_log_probs"].clamp(max=0), batch["advantages"], batch["mask"])
        batch["weights"] = token_weights(*signal, rule) if rule is not None else None
        loss = objective_loss(spec, **batch).loss_sum
        found.append([loss, *gradients(loss, batch)])
    assert any(g.any() for g in found[0][1:])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    open_gate = EntropyGate(GateConfig(target_entropy=0.3)).update(0.1)
    batch["weights"] = token_weights(*signal, open_gate.rule)
    assert not torch.equal(gradients(objective_loss(spec, **batch).loss_sum, batch)[0], found[0][1])


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo", "gspo_token", "unclipped"])
def test_on_policy_every_token_kind_has_the_gradient_of_reinforce(loss: str) -> None:
    batch = random_batch(4)
    batch["old_log_probs"] = batch["log_probs"].detach().clone()
    plain = {**batch, "terms": None, "multipliers": None}
    (gradient, _) = gradients(objective_loss(ObjectiveSpec(loss=loss), **plain).loss_sum, batch)
    expected = -batch["weights"] * batch["advantages"] * batch["mask"]
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_gspo_and_gspo_token_agree_where_a_sequence_has_one_advantage() -> None:
    """arXiv 2507.18071, section 4.3."""
    batch = {**random_batch(5, spread=0.1), "weights": None, "terms": None, "multipliers": None}
    results = [objective_loss(ObjectiveSpec(loss=kind), **batch) for kind in ("gspo", "gspo_token")]
    assert results[0].loss_sum.item() == pytest.approx(results[1].loss_sum.item(), rel=1e-12)
    a, b = (gradients(result.loss_sum, batch)[0] for result in results)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert a.any()


def test_gspo_by_sequence_mean_is_the_papers_objective() -> None:
    """The mean over responses of min(s A, clip(s) A) (arXiv 2507.18071, eq. 5)."""
    batch = {**random_batch(6, spread=0.3), "weights": None, "terms": None}
    lengths = torch.bincount(batch["sequence"][batch["mask"]], minlength=SEQUENCES)
    batch["multipliers"] = 1.0 / lengths[batch["sequence"]].clamp(min=1).double()
    spec = ObjectiveSpec(loss="gspo", clip_low=0.03, clip_high=0.04)
    found = objective_loss(spec, **batch).loss_sum.item()
    expected = 0.0
    for s in range(SEQUENCES):
        tokens = batch["mask"] & (batch["sequence"] == s)
        if tokens.any():
            a = batch["advantages"][tokens][0].item()
            ratio = (batch["log_probs"] - batch["old_log_probs"])[tokens].mean().exp().item()
            expected -= min(ratio * a, min(max(ratio, 0.97), 1.04) * a)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("spec", [everything_on(kind) for kind in KINDS], ids=KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_split_into_whole_sequences_gives_the_same_sums_and_gradients(spec, dtype) -> None:
    batch = random_batch(7, 400, dtype)
    whole = objective_loss(spec, **batch)
    whole_gradients = gradients(whole.loss_sum, batch)
    # Each microbatch numbers its sequences from 0; one is empty, and one holds the sequence without tokens.
    for split in ([[0, 1, 2], [3, 4, 5]], [[5, 0], [], [2], [4, 1, 3]], [[s] for s in range(SEQUENCES)]):
        parts: list[PolicyLoss] = []
        for chosen in split:
            rows = [(batch["sequence"] == s).nonzero().flatten() for s in chosen]
            numbers = [torch.full((len(r),), i) for i, r in enumerate(rows)]
            index = torch.cat([torch.empty(0, dtype=torch.int64), *rows])
            part = {k: v[index] for k, v in batch.items() if isinstance(v, torch.Tensor)}
            part["terms"] = TokenTerms(**{k: v[index] for k, v in batch["terms"].items()})
            part["sequence"] = torch.cat([torch.empty(0, dtype=torch.int64), *numbers])
            parts.append(objective_loss(spec, **part))
        total = sum(part.loss_sum for part in parts)
        assert total.item() == pytest.approx(whole.loss_sum.item(), rel=1e-6, abs=1e-6)
        for a, b in zip(gradients(total, batch), whole_gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for name, value in whole.metrics.items():
            assert sum(p.metrics[name].item() for p in parts) == pytest.approx(
                value.item(), rel=1e-6, abs=1e-6
            )
            assert all(set(p.metrics) == set(whole.metrics) for p in parts)


@for_every_spec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_the_mask_hides_reaches_neither_loss_nor_gradient(spec: ObjectiveSpec, bad: float) -> None:
    results = []
    for dirty in (False, True):
        batch = random_batch(8)
        hidden = ~batch["mask"]
        if dirty:
            spoil = lambda x, hidden=hidden: torch.where(hidden, bad, x.detach())  # noqa: E731
            for name, value in batch.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    batch[name] = spoil(value).requires_grad_(value.requires_grad)
            batch["terms"] = TokenTerms(**{k: spoil(v) for k, v in batch["terms"].items()})
            batch["sequence"] = torch.where(hidden, -1, batch["sequence"])
        result = objective_loss(spec, **batch)
        results.append((result, gradients(result.loss_sum, batch)))
    (clean, clean_gradients), (dirty, dirty_gradients) = results
    assert torch.equal(clean.loss_sum, dirty.loss_sum) and clean.metrics == dirty.metrics
    assert all(torch.equal(a, b) for a, b in zip(clean_gradients, dirty_gradients, strict=True))


@for_every_spec
@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_an_empty_mask_gives_exact_zero_and_no_nan(spec: ObjectiveSpec, n: int, bad: float) -> None:
    junk = torch.full((n,), bad)
    log_probs, entropy = junk.clone().requires_grad_(), junk.clone().requires_grad_()
    terms = TokenTerms(junk, junk, junk)
    sequence = torch.arange(n)
    mask = torch.zeros(n, dtype=torch.bool)
    result = objective_loss(
        spec, log_probs, entropy, junk, junk, mask, sequence, junk, junk, junk, terms, junk
    )
    assert result.loss_sum.item() == 0.0 and math.copysign(1, result.loss_sum.item()) == 1
    assert all(value.item() == 0.0 for value in result.metrics.values())
    for gradient in gradients(result.loss_sum, {"log_probs": log_probs, "entropy": entropy}):
        assert torch.equal(gradient, torch.zeros(n))


@pytest.mark.parametrize("name", ["old_log_probs", "advantages", "sampler_log_probs", "reference_log_probs"])
def test_a_nan_inside_the_mask_is_not_hidden(name: str) -> None:
    batch = random_batch(9)
    first = batch["mask"].nonzero()[0]
    batch["terms"] = None
    batch[name] = batch[name].index_fill(0, first[0], math.nan)
    assert objective_loss(everything_on("ppo_clip"), **batch).loss_sum.isnan()


@for_every_spec
@pytest.mark.parametrize("gap", [500.0, -500.0])
def test_a_runaway_ratio_stays_finite(spec: ObjectiveSpec, gap: float) -> None:
    batch = random_batch(10)
    for name in ("old_log_probs", "sampler_log_probs", "reference_log_probs"):
        batch[name] = batch["log_probs"].detach() + (gap if name != "sampler_log_probs" else -gap)
    result = objective_loss(spec, **batch)
    assert result.loss_sum.isfinite() and all(v.isfinite() for v in result.metrics.values())
    assert all(g.isfinite().all() for g in gradients(result.loss_sum, batch))


def test_metrics_are_sums_over_tokens() -> None:
    log_probs = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.5, -0.5, -1.0])
    sampler = old - torch.tensor([0.0, 1.0, 2.0, 0.5])
    result = objective_loss(
        ObjectiveSpec(correction="truncate", correction_cap=2.0, entropy_coef=0.1),
        log_probs,
        torch.tensor([0.1, 0.2, 0.3, 9.0], requires_grad=True),
        old,
        torch.tensor([1.0, 1.0, -1.0, 1.0]),
        torch.tensor([1, 1, 1, 0]),
        sampler_log_probs=sampler,
        reference_log_probs=log_probs.detach() - 1,
    )
    found = {name: value.item() for name, value in result.metrics.items()}
    assert found["clip_high"] == 1 and found["clip_low"] == 1 and found["dual_clip"] == 0
    assert found["correction_ratio"] == pytest.approx(1 + math.e + math.e**2)
    assert found["correction_weight"] == pytest.approx(1 + 2 + 2)
    assert found["correction_changed"] == 2
    assert found["entropy"] == pytest.approx(0.6)
    assert found["reference_kl"] == pytest.approx(3 * math.exp(-1))
    assert "control_kl" not in found


def test_a_reference_without_coefficient_is_a_metric_only() -> None:
    batch = {**random_batch(11), "terms": None}
    with_metric = objective_loss(ObjectiveSpec(), **batch)
    without = objective_loss(ObjectiveSpec(), **{**batch, "reference_log_probs": None})
    assert torch.equal(with_metric.loss_sum, without.loss_sum)
    assert with_metric.metrics["reference_kl"] > 0 and "reference_kl" not in without.metrics


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "grpo"}, "loss='grpo' is none of ppo_clip, gspo"),
        ({"clip_low": 1.0}, r"clip_low=1.0 is not in \[0, 1\)"),
        ({"loss": "cispo", "clip_low": 1.1}, r"clip_low=1.1 is not in \[0, 1\]"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0"),
        ({"kl_estimator": "abs"}, "kl_estimator='abs' is none of k1, k2, k3"),
        ({"entropy_coef": math.inf}, "entropy_coef=inf"),
        ({"correction": "clip"}, "correction='clip' is none of none, truncate, mask"),
        ({"correction_level": "batch"}, "correction_level='batch'"),
        ({"correction_cap": 0.0}, "correction_cap=0.0"),
        ({"correction_floor": 0.5}, "correction_floor=0.5 is for correction='mask'"),
        ({"correction": "mask", "correction_floor": 3.0}, "correction_floor=3.0 is above"),
    ],
)
def test_a_spec_out_of_range_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectiveSpec(**change)


def test_cispo_may_have_no_lower_bound() -> None:
    assert ObjectiveSpec(loss="cispo", clip_low=1.0).clip_low == 1.0


@pytest.mark.parametrize(
    ("spec", "missing", "message"),
    [
        ({"loss": "gspo"}, "sequence", "loss='gspo' needs `sequence`"),
        (
            {"correction": "mask", "correction_level": "sequence"},
            "sequence",
            "correction_level='sequence' needs `sequence`",
        ),
        ({"correction": "mask"}, "sampler_log_probs", "correction='mask' needs `sampler_log_probs`"),
        ({"kl_coef": 0.1}, "reference_log_probs", "kl_coef=0.1 needs `reference_log_probs`"),
        ({"entropy_coef": 0.1}, "entropy", "entropy_coef=0.1 needs `entropy`"),
    ],
)
def test_a_tensor_that_is_missing_is_asked_for(spec: dict, missing: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective_loss(ObjectiveSpec(**spec), **{**random_batch(12), missing: None})


def test_an_entropy_bonus_without_gradient_is_refused() -> None:
    batch = random_batch(13)
    batch["entropy"] = batch["entropy"].detach()
    with pytest.raises(ValueError, match="entropy with gradient"):
        objective_loss(ObjectiveSpec(entropy_coef=0.1), **batch)


def test_unequal_shapes_are_refused_by_name() -> None:
    batch = random_batch(14)
    wrong = torch.zeros(3)
    for name in itertools.chain(set(batch) - {"log_probs", "terms"}):
        with pytest.raises(ValueError, match=f"{name} has shape"):
            objective_loss(ObjectiveSpec(), **{**batch, name: wrong})
    for field in dataclasses.fields(TokenTerms):
        with pytest.raises(ValueError, match=f"terms.{field.name} has shape"):
            objective_loss(ObjectiveSpec(), **{**batch, "terms": TokenTerms(**{field.name: wrong})})
