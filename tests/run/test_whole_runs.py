"""The command as a person uses it: real ranks, real servers, signals, resume, and nothing left behind."""

from __future__ import annotations

import json
import signal

from megatron_stare.report import read_metrics
from megatron_stare.tasks.sums import sum_pairs
from tests.support.whole_runs import finish, left_over, start, steps_logged, wait_for, write_config


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


def test_a_row_that_fits_in_no_microbatch_ends_the_run_with_a_word_about_it(tmp_path, tiny_model_dir):
    # Supervised, so no servers.
    rows = [{"prompt": "10=", "answer": "1" * 80}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = write_config(
        tmp_path,
        tiny_model_dir,
        task={"source": str(tmp_path / "data.jsonl"), "reward": "exact"},
        parallel={"tp": 1},
    )
    code, output = finish(start("train", config, "objective=sft"))
    assert code == 2, output
    assert "batch.max_tokens_per_microbatch=64" in output
    assert "Traceback" not in output
    assert left_over(tmp_path) == []
