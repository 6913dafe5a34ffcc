from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megatron_stare.config import Config, ConfigError, check_config, find_problems, load_config, run_directory
from megatron_stare.tasks import sums
from megatron_stare.weights import write_tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """4 heads, 2 key-value heads, 128 feed-forward columns, 2 layers, 1024 positions."""
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", vocab_size=16)
    sums.write_tokenizer(path)
    return path


@pytest.fixture
def config(model, tmp_path, monkeypatch):
    """A function from overrides to a config that has nothing wrong with it but them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12=", "answer": 12}\n')
    text = f"""
model: {{path: {model}}}
task: {{source: rows.jsonl, chat_template: false, max_prompt_tokens: 16}}
rollout: {{max_response_tokens: 48, context_length: 64}}
batch: {{prompts_per_step: 4, responses_per_prompt: 4, max_tokens_per_microbatch: 64}}
"""
    (tmp_path / "c.yaml").write_text(text)

    def load(*overrides: str) -> Config:
        return load_config(tmp_path / "c.yaml", overrides)

    return load


def the_problem(config: Config, world_size: int = 1) -> str:
    problems = find_problems(config, world_size)
    assert len(problems) == 1, problems
    assert "\n" not in problems[0]
    return problems[0]


def test_a_sound_config_has_no_problems(config):
    check_config(config(), 1)
    check_config(config("parallel.tp=2", "parallel.pp=2"), 4)
    check_config(config("parallel.tp=2", "parallel.cp=2"), 8)
    check_config(config("model.dtype=bfloat16", "report.wandb=true"), 2)


def test_all_problems_are_raised_together(config):
    wrong = config("model.path=nowhere", "task.source=no.jsonl", "parallel.cp=2")
    with pytest.raises(ConfigError) as caught:
        check_config(wrong, 3)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (["parallel.cp=2"], 3, "parallel: 3 trainer ranks are not a multiple of tp=1 * pp=1 * cp=2 = 2"),
        (["parallel.cp=3"], 3, "padded to a multiple of 2 * parallel.cp=3); allowed: at least 66"),
        (["parallel.ep=2"], 2, "parallel.ep=2: the model has no experts; allowed: 1"),
        (["parallel.expert_balance=0.01"], 1, "parallel.expert_balance=0.01: the model has no experts"),
        (
            ["parallel.optimizer_offload=0.5", "parallel.distributed_optimizer=true"],
            1,
            "parallel.optimizer_offload=0.5: moves the optimizer's state out of a GPU's memory",
        ),
        (["model.fp8=blockwise"], 1, "model.fp8=blockwise: needs a CUDA GPU, and none is here"),
        (["model.fp8_keep_ends=2"], 1, "model.fp8_keep_ends=2: needs model.fp8"),
        (["parallel.tp=4"], 4, "parallel.tp=4: does not divide the model's 2 key-value heads; allowed: 1, 2"),
        (["parallel.pp=4"], 4, "parallel.pp=4: 4 stages do not divide the model's 2 layers; allowed: 1, 2"),
        (["parallel.pp=2", "parallel.vpp=2"], 2, "parallel.pp=2 * parallel.vpp=2: 4 stages do not divide"),
        (["parallel.tp=2"], 3, "parallel: 3 trainer ranks are not a multiple of tp=2 * pp=1 = 2"),
        ([], 3, "batch.prompts_per_step * batch.responses_per_prompt / batch.updates_per_step = 16"),
        (["batch.updates_per_step=4"], 8, "= 4: is not a multiple of the 8 data-parallel ranks"),
        (["batch.max_tokens_per_microbatch=63"], 1, "batch.max_tokens_per_microbatch=63: the longest"),
        (["rollout.context_length=2048"], 1, "context_length=2048: the model knows positions up to 1024"),
        (["rollout.tp=3"], 1, "rollout.tp=3: does not divide the model's 4 attention heads"),
        (["rollout.endpoints=[localhost:30000]"], 1, "rollout.endpoints=localhost:30000: must be a URL"),
        (["algorithm.entropy_control=top_entropy"], 1, "80/20 (top_entropy) does not go with STARE"),
        (["algorithm.loss=gspo"], 1, "'gspo_token' keeps it"),
        (
            ["stare.enabled=false", "algorithm.entropy_control=kl_cov", "algorithm.control_args={a: 1}"],
            1,
            "kl_cov takes fraction, coef",
        ),
        (["stare.gate=off", "stare.target_entropy=auto"], 1, "'auto' would be used by nothing"),
        (["stare.rule=custom", "stare.weights={high: 2.0}"], 1, "stare: "),
        (["stare.gate=band", "stare.H_min=0.2"], 1, "give both or neither"),
        (["rollout.model_path=nowhere"], 1, "rollout.model_path=nowhere: is not a Hugging Face directory"),
        (
            ["rollout.wire=fp8_blockwise", "rollout.endpoints=[http://127.0.0.1:1]"],
            1,
            "is not block-wise FP8; make one with `megatron-stare export --quant fp8_blockwise`",
        ),
        (["model.path=nowhere"], 1, "model.path=nowhere: model directory nowhere does not exist"),
        (["task.source=no.jsonl"], 1, "task.source=no.jsonl"),
        (["task.source=no_such_module:rows"], 1, "no module named 'no_such_module'"),
        (["task.source=reasoning_gym:chain_sun"], 1, "chain_sum"),
        (["evaluation.source=no.jsonl"], 1, "evaluation.source=no.jsonl"),
        (["task.reward=megatron_stare.tasks.sums:rewrad"], 1, "did you mean 'reward'?"),
        (["task.reward=no_such_module:f"], 1, "task.reward=no_such_module:f"),
    ],
)
def test_what_cannot_run_is_one_line_that_names_the_key(config, overrides, world_size, expected):
    assert expected in the_problem(config(*overrides), world_size)


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (["parallel.tp=2"], 2, "parallel.tp=2: a model with experts needs expert parallelism beside it"),
        (["parallel.tp=2", "parallel.ep=2"], 2, "parallel.sequence_parallel=false: a model with experts"),
        (["parallel.ep=2"], 1, "parallel.ep=2: does not divide the 1 ranks of a pipeline stage"),
        (["parallel.ep=8"], 8, "parallel.ep=8: does not divide the model's 4 experts; allowed: 1, 2, 4"),
        (["parallel.ep=4", "parallel.cp=2", "parallel.pp=2"], 4, "does not divide the 2 ranks of a pipeline"),
    ],
)
def test_what_experts_cannot_do_is_refused(config, tmp_path, overrides, world_size, expected):
    moe = write_tiny_checkpoint(tmp_path / "moe", architecture="qwen3_moe", vocab_size=16)
    sums.write_tokenizer(moe)
    assert expected in the_problem(config(f"model.path={moe}", *overrides), world_size)


def test_experts_are_shared_out_over_all_ranks_of_a_stage(config, tmp_path):
    moe = write_tiny_checkpoint(tmp_path / "moe", architecture="qwen3_moe", vocab_size=16)
    sums.write_tokenizer(moe)
    layout = ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.cp=2", "parallel.ep=4"]
    check_config(config(f"model.path={moe}", *layout), 4)


def test_a_broken_line_of_the_dataset_is_named(config, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12=", "answer": 12}\n{"prompt": "13="\n')
    assert "rows.jsonl:2" in the_problem(config())


def test_functions_are_found_in_the_working_directory(config, tmp_path):
    (tmp_path / "my_checked_rewards.py").write_text("def good(response, answer):\n    return 1.0\n")
    check_config(config("task.reward=my_checked_rewards:good"), 1)


def test_a_busy_port_is_told(config):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"rollout.port={port}: address already in use" in the_problem(config(f"rollout.port={port}"))
        # servers of others are not started, so their port does not matter
        others = config(f"rollout.port={port}", f"rollout.endpoints=[http://127.0.0.1:{port}]")
        assert find_problems(others, 1) == []


def test_a_directory_that_holds_a_run_is_not_written_over(config, tmp_path):
    (tmp_path / "runs/run").mkdir(parents=True)
    check_config(config(), 1)
    (tmp_path / "runs/run/metrics.jsonl").touch()
    assert "already holds a run: continue it with resume.mode=auto" in the_problem(config())
    check_config(config("resume.mode=auto"), 1)
    check_config(config("run.name=other"), 1)


def test_a_run_directory_that_cannot_be_made_is_told(config, tmp_path):
    (tmp_path / "file").touch()
    assert "is a file, not a directory" in the_problem(config("run.dir=file/run"))
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        assert "is not writeable" in the_problem(config("run.dir=locked/run"))


def test_supervised_training_asks_for_no_servers_and_no_reward(config):
    sft = ["objective=sft", "task.reward=no_such:module", "rollout.context_length=4096", "rollout.tp=3"]
    check_config(config(*sft), 4)
    assert "batch.prompts_per_step / batch.updates_per_step = 4" in the_problem(config(*sft), 3)


def test_transformer_engine_needs_a_gpu(config):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "needs a CUDA GPU" in the_problem(config("model.layers=transformer_engine"))


def test_the_run_directory_follows_name_and_dir(config):
    assert run_directory(config()) == Path("runs/run")
    assert run_directory(config("run.dir=/x/y")) == Path("/x/y")
