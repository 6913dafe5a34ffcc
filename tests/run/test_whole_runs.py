"""The command as a person uses it: real ranks, real servers, signals, resume, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_stare.report import read_metrics
from megatron_stare.tasks.sums import sum_pairs


def write_config(root: Path, model: Path, **sections) -> Path:
    """A small RL run on the sums task; `sections` replace values a section."""
    values: dict = {
        "run": {"name": "test", "dir": str(root / "run"), "steps": 1000, "grace_seconds": 60},
        "model": {"path": str(model), "dtype": "float32", "vocab_multiple": 8},
        "parallel": {"tp": 2},
        "task": {
            "source": "megatron_stare.tasks.sums:sum_pairs",
            "size": 100,
            "chat_template": False,
            "max_prompt_tokens": 8,
            "reward": "megatron_stare.tasks.sums:reward",
        },
        "batch": {"prompts_per_step": 2, "responses_per_prompt": 4, "max_tokens_per_microbatch": 64},
        "optimizer": {"lr": 1e-3},
        "rollout": {"max_response_tokens": 6, "context_length": 64, "max_total_tokens": 4096},
        "checkpoint": {"every": 0},
        "report": {"tensorboard": False, "plot_every": 0},
    }
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(*arguments: str | Path) -> subprocess.Popen:
    """The command in its own session, as a terminal would start it."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_stare", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float = 200) -> tuple[int, str]:
    """Exit code and output; ends the process when it takes too long."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"not finished after {timeout} s:\n{output[-4000:]}")
    return process.returncode, output


def wait_for(condition, process: subprocess.Popen, timeout: float = 200) -> None:
    """Poll until `condition()`; fails when the process ends first or time is up."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"it did not come to that:\n{process.communicate()[0][-4000:]}")
        time.sleep(0.2)


def left_over(root: Path) -> list[str]:
    """Command lines of processes that still have to do with this test."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(root) in line and process.pid != os.getpid():
            found.append(line)
    return found


def steps_logged(root: Path) -> int:
    path = root / "run" / "metrics.jsonl"
    return len(read_metrics(path)) if path.exists() else 0


def test_sigterm_saves_and_a_resumed_run_goes_on_in_another_layout(tmp_path, tiny_model_dir):
    config = write_config(tmp_path, tiny_model_dir)
    process = start("train", config)
    wait_for(lambda: steps_logged(tmp_path) >= 3, process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    assert "continue with resume.mode=auto" in output
    assert left_over(tmp_path) == []
    done = steps_logged(tmp_path)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{done:07d}"
    state = json.loads((checkpoint / "run_state.json").read_text())
    assert state["steps"] == done

    code, output = finish(
        start(
            "train",
            config,
            "resume.mode=auto",
            f"run.steps={done + 2}",
            "rollout.sync=disk",
            "rollout.router=false",
            "parallel.tp=1",
            "parallel.world_size=2",
            "checkpoint.hf_at_end=true",
            f"checkpoint.hf_every={done + 1}",
        )
    )
    assert code == 0, output
    assert left_over(tmp_path) == []
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(done + 2))
    # The sampler's and the trainer's log-probs of the same tokens, after syncs by both methods.
    assert max(row["sampler_gap/max"] for row in rows) < 1e-4
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
    (export,) = (tmp_path / "run" / "hf-steps").iterdir()
    assert export.name == f"step_{done + 1:07d}"
    assert f"after {done + 1} of {done + 2} steps" in (export / "README.md").read_text()
    assert (tmp_path / "run" / "entropy.png").is_file()


def test_a_changed_optimizer_form_and_a_changed_dataset_are_refused_on_resume(tmp_path, tiny_model_dir):
    rows = [{"prompt": row["prompt"], "answer": "23+24"} for row in sum_pairs(8, 0)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = write_config(
        tmp_path,
        tiny_model_dir,
        run={"steps": 1},
        task={"source": str(tmp_path / "data.jsonl"), "reward": "exact"},
        parallel={"tp": 1},
    )
    code, output = finish(start("train", config, "objective=sft"))
    assert code == 0, output
    resume = ("objective=sft", "resume.mode=auto", "run.steps=2")
    code, output = finish(start("train", config, *resume, "parallel.distributed_optimizer=true"))
    assert code == 2, output
    assert "error: parallel.distributed_optimizer=True cannot resume" in output
    rows = [{"prompt": row["prompt"], "answer": "24+23"} for row in sum_pairs(7, 0)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, output = finish(start("train", config, *resume))
    assert code == 2, output
    assert "error:" in output
    assert "Traceback" not in output


def test_ctrl_c_while_servers_start_ends_everything(tmp_path, tiny_model_dir):
    process = start("train", write_config(tmp_path, tiny_model_dir))
    wait_for((tmp_path / "run" / "logs" / "server-0.log").exists, process)
    process.send_signal(signal.SIGINT)
    code, output = finish(process, timeout=60)
    assert code == 75, output
    assert "nothing to save" in output
    assert left_over(tmp_path) == []


def test_a_failing_rank_ends_the_run_with_its_reason(tmp_path, tiny_model_dir):
    # Supervised, so no servers: the response is longer than a microbatch may be.
    rows = [{"prompt": "10=", "answer": "1" * 80}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = write_config(
        tmp_path,
        tiny_model_dir,
        task={"source": str(tmp_path / "data.jsonl"), "reward": "exact"},
        parallel={"tp": 1},
    )
    code, output = finish(start("train", config, "objective=sft"))
    assert code == 1, output
    assert "max_tokens_per_microbatch=64" in output
    assert "trainer-0.log" in output
    assert "Traceback" not in output
    assert left_over(tmp_path) == []
