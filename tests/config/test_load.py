from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stare.config import ConfigError, config_keys, dump_config, load_config
from megatron_stare.errors import UserError

BASE = """
model: {path: models/tiny}
task: {source: rows.jsonl, source_args: {low: 1, high: 9}}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert isinstance(caught.value, UserError)
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def test_defaults_fill_what_a_file_leaves_out(base):
    config = load_config(base)
    assert config.model.path == "models/tiny"
    assert (config.optimizer.lr, config.stare.rule, config.run.steps) == (1e-6, "o1", 100)


@pytest.mark.parametrize("number", ["1e-6", "1E-06", "0.000001", ".000001", "1.0e-6"])
def test_numbers_in_scientific_notation_are_numbers(base, number):
    base.write_text(BASE + f"optimizer: {{lr: {number}}}\n")
    assert load_config(base).optimizer.lr == 1e-6
    assert load_config(base, [f"optimizer.lr={number}"]).optimizer.lr == 1e-6


def test_off_is_a_word_and_not_false(base):
    base.write_text(BASE + "stare: {gate: off}\n")
    assert load_config(base).stare.gate == "off"
    assert load_config(base, ["stare.gate=off"]).stare.gate == "off"


def test_overrides_take_any_yaml_value(base):
    config = load_config(
        base,
        [
            "rollout.endpoints=[http://a:1, http://b:2]",
            "rollout.server_args={attention_backend: triton, level: 3}",
            "algorithm.dual_clip=null",
            "report.wandb=true",
            "task.source_args.high=20",
            "run.steps=7",
        ],
    )
    assert config.rollout.endpoints == ["http://a:1", "http://b:2"]
    assert config.rollout.server_args == {"attention_backend": "triton", "level": 3}
    assert config.algorithm.dual_clip is None
    assert config.report.wandb is True
    assert config.task.source_args == {"low": 1, "high": 20}
    assert config.run.steps == 7


def test_a_later_override_wins_and_a_value_replaces_a_mapping(base):
    config = load_config(base, ["run.seed=1", "run.seed=2", "task.source_args={a: 1}"])
    assert (config.run.seed, config.task.source_args) == (2, {"a": 1})


def test_an_override_of_a_section_keeps_its_other_keys(base):
    config = load_config(base, ["optimizer.warmup_steps=3", "optimizer={lr: 3e-4}"])
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (3e-4, 3)


@pytest.mark.parametrize("text", ["7", "true", "on", "You are: *brief*", "[x", "a=b", "1e-3"])
def test_text_on_the_command_line_needs_no_quotes(base, text):
    assert load_config(base, [f"task.system_prompt={text}"]).task.system_prompt == text


def test_extends_merges_deeply_and_relative_to_the_file(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/a.yaml").write_text(BASE + "optimizer: {lr: 1e-4, warmup_steps: 5}\n")
    (tmp_path / "shared/b.yaml").write_text("extends: a.yaml\noptimizer: {lr: 2e-4}\nrun: {seed: 1}\n")
    (tmp_path / "c.yaml").write_text("run: {seed: 2, steps: 9}\n")
    top = tmp_path / "top.yaml"
    top.write_text("extends: [shared/b.yaml, c.yaml]\nrun: {steps: 10}\ntask: {source_args: {low: 3}}\n")
    config = load_config(top, [])
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (2e-4, 5)
    assert (config.run.seed, config.run.steps) == (2, 10)
    assert config.task.source_args == {"low": 3, "high": 9}


def test_extends_in_a_circle_names_the_circle(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    assert "a.yaml -> b.yaml -> a.yaml" in problems(tmp_path / "a.yaml")[0]


def test_a_shared_parent_is_no_circle(tmp_path, base):
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text("extends: base.yaml\n")
    (tmp_path / "top.yaml").write_text("extends: [a.yaml, b.yaml]\n")
    assert load_config(tmp_path / "top.yaml").model.path == "models/tiny"


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("optimzer.lr=1", "optimizer.lr"),
        ("lr=1", "optimizer.lr"),
        ("optimizer.warmup=1", "optimizer.warmup_steps"),
        ("stare.w=1.2", "stare.W"),
        ("stare.lr=1", "optimizer.lr"),
        ("steps=5", "run.steps"),
        ("rollout.temprature=1", "rollout.temperature"),
        ("optimiser={lr: 1}", "optimizer.lr"),
        ("batch.prompts=2", "batch.prompts_per_step"),
    ],
)
def test_an_unknown_key_names_the_nearest(base, override, near):
    (problem,) = problems(base, override)
    assert f"did you mean {near}?" in problem
    assert problem.endswith("(command line)")


def test_an_unknown_key_far_from_all_lists_what_is_allowed(base):
    assert "the keys of stare are enabled, rule" in problems(base, "stare.zzzzzz=1")[0]
    assert "the sections are objective, run, resume, model" in problems(base, "qqqq.zzzz=1")[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=-1", "optimizer.lr=-1: must be above 0"),
        ("optimizer.beta1=1", "optimizer.beta1=1: must be below 1"),
        ("rollout.port=70000", "rollout.port=70000: must be at most 65535 or null"),
        ("run.steps=abc", "run.steps=abc: must be a whole number"),
        ("run.steps=1e4", "run.steps=10000.0: must be a whole number: write 10000"),
        ("run.steps=true", "run.steps=true: must be a whole number"),
        ("report.wandb=1", "report.wandb=1: must be true or false"),
        ("stare.rule=o3", "stare.rule=o3: allowed: o1, c2"),
        ("objective=ppo", "objective=ppo: allowed: rl, sft"),
        ("optimizer.lr=.nan", "optimizer.lr=.nan: must be a finite number"),
        ("optimizer.lr={a: 1}", "optimizer.lr={a: 1}: must be a number"),
        ("rollout.endpoints=[3]", "rollout.endpoints.0=3: must be text"),
        ("rollout.server_args=3", "rollout.server_args=3: must be keys and values"),
        ("model.path=null", "model.path=null: must be text"),
        ("run=5", "run=5: is a section; its keys are name, dir"),
        ("optimizer.lr=[1", "optimizer.lr=[1: broken YAML"),
        ("nonsense", "'nonsense' is not an override"),
        ("parallel.sequence_parallel=true", "parallel.sequence_parallel=true needs tp > 1"),
        ("task.reward=exat", "task.reward=exat is not one of exact, math, reasoning_gym"),
        ("batch.updates_per_step=3", "batch.updates_per_step=3 does not divide"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_allowed(base, override, expected):
    (problem,) = problems(base, override)
    assert problem.startswith(expected)


def test_all_mistakes_are_told_at_once_and_where_they_stand(base):
    base.write_text(BASE + "optimizer:\n  lr: -1\nrunn: {seed: 0}\n")
    found = problems(base, "run.seed=-1")
    assert len(found) == 3
    assert any(f"({base}:5)" in p and "optimizer.lr" in p for p in found)
    assert any(f"({base}:6)" in p and "runn.seed" in p for p in found)
    assert any("(command line)" in p and "run.seed=-1" in p for p in found)


def test_a_missing_key_is_named(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("task: {source: a.jsonl}\n")
    assert problems(path) == ["model.path: is missing"]
    path.write_text("")
    assert problems(path) == ["model.path: is missing"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\n", "broken YAML"),
        ("run: {seed: 1}\nrun: {seed: 2}\n", ":2: broken YAML: the key 'run' stands here a second time"),
        ("- 1\n", "must hold keys and values"),
        ("a: &x {b: *x}\n", "nested too deeply"),
        ("extends: 3\n", "extends=3: must be a file name"),
        ("extends: nowhere.yaml\n", "nowhere.yaml: no such config file, which x.yaml extends"),
        ("a: !!python/object:os.system {}\n", "broken YAML"),
        ("1: 2\n", "1: no such key"),
    ],
)
def test_a_broken_file_is_one_line_with_its_place(tmp_path, text, expected):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert expected in problems(path)[0]


def test_a_missing_file_is_named(tmp_path):
    assert problems(tmp_path / "no.yaml") == [f"{tmp_path / 'no.yaml'}: no such config file"]
    assert "cannot be read" in problems(tmp_path)[0]


def test_an_empty_section_means_its_defaults(base):
    base.write_text(BASE + "stare:\nrun:\n  # seed: 1\n")
    assert load_config(base).stare.enabled


def test_a_dumped_config_loads_to_an_equal_one(base, tmp_path):
    config = load_config(
        base,
        [
            "run.name=1e-6",
            "task.system_prompt=off",
            "optimizer.lr=1e-6",
            "rollout.server_args={x: '1e-6', y: 1e-6, z: 'null', t: 'über: 12:30'}",
            "stare.gate=off",
        ],
    )
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config), encoding="utf-8")
    assert load_config(again) == config
    assert config.rollout.server_args == {"x": "1e-6", "y": 1e-6, "z": "null", "t": "über: 12:30"}


def test_every_key_of_the_list_can_be_overridden_with_its_own_value(base):
    config = load_config(base)
    dumped = config.model_dump(mode="json")
    for key in config_keys():
        value = dumped
        for part in key.split("."):
            value = value[part]
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        if isinstance(value, dict):
            text = "{low: 1, high: 9}" if key == "task.source_args" else "{}"
        if key != "task.system_prompt":
            assert load_config(base, [f"{key}={text}"]) == config, key
    assert {"optimizer.lr", "objective", "task.source_args"} <= set(config_keys())
