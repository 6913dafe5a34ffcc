"""Every configuration that is shipped loads, and those of published models fit GPUs of 80 GB."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stare.cli import run
from megatron_stare.config.load import ConfigError, load_config
from megatron_stare.plan.architecture import find_architecture
from megatron_stare.plan.plan import Options, make_plan
from megatron_stare.weights import write_tiny_checkpoint

CONFIGS = Path(__file__).parents[2] / "configs"
BASES = {"paper.yaml": "model.path: is missing", "quickstart/base.yaml": "model.path: is missing"}
WHOLE = sorted(
    path.relative_to(CONFIGS).as_posix()
    for path in CONFIGS.rglob("*.yaml")
    if path.relative_to(CONFIGS).as_posix() not in BASES
)
# The quickstart makes its model; SmolLM2 comes from a package: neither is a published directory.
LOCAL = [name for name in WHOLE if name.startswith(("quickstart/", "smollm2"))]
PUBLISHED = [name for name in WHOLE if name not in LOCAL]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_models_config_fits_80_gb(name):
    config = load_config(CONFIGS / name)
    plan = make_plan(config, find_architecture(config.model.path), Options())
    assert plan.fits, [*plan.rules, *plan.problems]
    assert 0.2 * plan.hardware.memory < plan.worst.total
    assert config.optimizer.lr == 1e-6 and config.algorithm.clip_high == 0.28
    assert (config.batch.prompts_per_step, config.batch.responses_per_prompt) == (64, 8)
    text = (CONFIGS / name).read_text()
    assert "80 GB" in text and "not run" in " ".join(text.split()).replace("# ", "")


def test_all_models_of_the_paper_have_one():
    models = {Path(load_config(CONFIGS / name).model.path).name for name in PUBLISHED}
    assert models == {
        "Qwen2.5-Math-7B",
        "Qwen2.5-14B",
        "Qwen2.5-32B",
        "Qwen3-8B",
        "Qwen3-30B-A3B",
        "DeepSeek-R1-Distill-Qwen-1.5B",
        "Qwen2.5-7B",
    }


@pytest.mark.parametrize("name", LOCAL)
def test_a_small_config_can_be_planned(name, tmp_path):
    # The shape of the model does not matter here; it must be one that the layout cuts.
    overrides = [] if name.startswith("smollm2") else [f"model.path={tmp_path}/made-later"]
    config = load_config(CONFIGS / name, overrides)
    model = write_tiny_checkpoint(tmp_path / "model", heads=4, kv_heads=2, max_position_embeddings=4096)
    plan = make_plan(config, find_architecture(str(model)), Options(layers="local"))
    assert plan.fits and plan.stages


@pytest.mark.parametrize("name", BASES)
def test_a_base_lacks_only_what_it_leaves_to_others(name):
    with pytest.raises(ConfigError) as error:
        load_config(CONFIGS / name)
    assert any(BASES[name] in problem for problem in error.value.problems)


def test_json_has_everything(capfd):
    code = run(["plan", str(CONFIGS / "qwen2.5-math-7b.yaml"), "--json"])
    result = json.loads(capfd.readouterr().out)
    assert code == 0 and result["fits"] and result["rules"] == []
    assert result["model"]["parameters"] == 7_615_616_512
    (stage,) = result["stages"]
    parts = ("weights", "gradients", "optimizer", "activations", "log_prob", "total", "static")
    assert all(stage[part] > 0 for part in parts)
    assert stage["total"] >= stage["static"] + stage["activations"]
    assert result["serving"]["kv_bytes_a_token"] == 56 * 1024
    assert set(result["sent_bytes"]) == {"TP", "DP gradients", "DP parameters"}
    assert result["seconds"]["total"] > 0 and len(result["assumptions"]) >= 5


def test_too_little_memory_and_broken_rules_end_with_1(capfd):
    config = str(CONFIGS / "qwen2.5-math-7b.yaml")
    assert run(["plan", config, "--memory", "40GB"]) == 1
    assert "memory: a rank of stage 0 needs" in capfd.readouterr().out
    assert run(["plan", config, "parallel.tp=8", "parallel.world_size=8"]) == 1
    out = capfd.readouterr().out
    assert "parallel.tp=8: does not divide the model's 28 attention heads" in out
    assert "batch.max_tokens_per_microbatch=1024" not in out
    assert run(["plan", config, "parallel.tp=8", "parallel.world_size=8",
                "batch.max_tokens_per_microbatch=1024"]) == 1  # fmt: skip
    out = capfd.readouterr().out
    assert "batch.max_tokens_per_microbatch=1024" in out and "parallel.tp=8" in out, "all rules at once"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "lots"], "'lots' is not a size"),
        (["--model", "Nothing-9B"], "--model=Nothing-9B"),
        (["--gpus", "4"], "--gpus=4"),
        (["model.path=models/Nothing-9B"], "model.path=models/Nothing-9B"),
    ],
)
def test_mistakes_end_with_2(capfd, arguments, message):
    assert run(["plan", str(CONFIGS / "qwen2.5-math-7b.yaml"), *arguments]) == 2
    assert message in capfd.readouterr().err


def test_search_proposes_layouts_that_fit(capfd):
    config = str(CONFIGS / "r1-distill-qwen-1.5b.yaml")
    assert run(["plan", config, "--gpus", "6", "--search", "--json"]) == 0
    plans = json.loads(capfd.readouterr().out)
    seconds = [plan["seconds"]["total"] for plan in plans]
    assert len(plans) >= 2 and seconds == sorted(seconds) and all(plan["fits"] for plan in plans)
    layouts = [tuple(plan["parallel"][key] for key in ("tp", "pp", "cp", "ep")) for plan in plans]
    assert len(set(layouts)) == len(layouts)
