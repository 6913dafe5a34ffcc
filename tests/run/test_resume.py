"""Which changes of the config a resumed run takes, and which it refuses by name."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.run.resume import check_allowances, check_same, saved_values

SHAPE = {"architecture": "Qwen3ForCausalLM", "num_layers": 2}


def config(**sections) -> Config:
    values = {"model": {"path": "m"}, "task": {"source": "a.jsonl"}}
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    return TypeAdapter(Config).validate_python(values)


def check(before: Config, after: Config, shape=SHAPE) -> None:
    check_same(after, shape, saved_values(before, SHAPE), "step_0000010")


@pytest.mark.parametrize(
    "changes",
    [
        {"run": {"steps": 5000, "name": "other", "restarts": 1}},
        {"parallel": {"tp": 4, "sequence_parallel": True, "pp": 2, "recompute": "full"}},
        {"batch": {"max_tokens_per_microbatch": 100}},
        {"rollout": {"servers": 7, "router": False, "sync": "disk", "port": 4000}},
        {"checkpoint": {"every": 3, "keep_last": 9}},
        {"evaluation": {"every": 3}, "report": {"wandb": True}},
        {"model": {"path": "moved"}, "task": {"source": "moved.jsonl", "reward_workers": 5}},
        {"optimizer": {"max_skipped": 9}, "resume": {"mode": "auto"}},
    ],
)
def test_how_and_where_a_run_computes_may_change(changes):
    check(config(), config(**changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.seed", 1),
        ("optimizer.lr", 1e-4),
        ("stare.W", 1.2),
        ("algorithm.loss", "gspo"),
        ("batch.prompts_per_step", 32),
        ("rollout.temperature", 0.9),
        ("task.reward", "math"),
        ("task.shuffle", False),
    ],
)
def test_what_a_run_learns_may_change_only_where_it_is_allowed(key, value):
    section, name = key.split(".")
    with pytest.raises(UserError, match=rf"{key}=.*resume\.allow=\[{key}\]"):
        check(config(), config(**{section: {name: value}}))
    allowed = config(**{section: {name: value}, "resume": {"allow": [key]}})
    check_allowances(allowed)
    check(config(), allowed)


def test_every_change_is_named_at_once():
    with pytest.raises(UserError) as error:
        check(config(), config(optimizer={"lr": 1e-4}, stare={"W": 1.2}))
    assert len(str(error.value).splitlines()) == 2


def test_more_steps_are_free_under_a_constant_rate_and_named_under_another():
    check(config(run={"steps": 10}), config(run={"steps": 20}))
    cosine = {"optimizer": {"schedule": "cosine"}}
    with pytest.raises(UserError, match="run.steps=20 is not what step_0000010 was saved with"):
        check(config(run={"steps": 10}, **cosine), config(run={"steps": 20}, **cosine))


@pytest.mark.parametrize(
    "changes", [{"model": {"dtype": "float32"}}, {"parallel": {"distributed_optimizer": True}}]
)
def test_the_optimizers_form_cannot_change_even_where_it_is_allowed(changes):
    ((section, ((key, _),)),) = ((s, tuple(c.items())) for s, c in changes.items())
    with pytest.raises(UserError, match="stored in another form"):
        check(config(), config(**changes))
    with pytest.raises(UserError, match=f"resume.allow={section}.{key}"):
        check_allowances(config(resume={"allow": [f"{section}.{key}"]}))


def test_another_model_is_refused_by_what_differs():
    with pytest.raises(UserError, match="holds another model.*num_layers"):
        check(config(), config(), SHAPE | {"num_layers": 3})


def test_an_allowance_that_is_no_key_is_refused():
    with pytest.raises(UserError, match="resume.allow=optimizer.lrr"):
        check_allowances(config(resume={"allow": ["optimizer.lrr"]}))
