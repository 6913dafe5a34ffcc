"""Supervised runs that lose ranks, hang, diverge, or are started twice. No servers, so all is quick."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos_kills import tensors
from megatron_stare.report import read_metrics
from megatron_stare.run.problems import read_problems
from tests.support.whole_runs import finish, left_over, slow, start, wait_for, write_config

STEPS = 30


def supervised(root: Path, model: Path, run=None, **sections) -> Path:
    """Supervised training on the sums task with a checkpoint every four steps."""
    root.mkdir(exist_ok=True)
    return write_config(
        root,
        model,
        run={"steps": STEPS, "hang_seconds": 60.0} | (run or {}),
        task={"source": "megatron_stare.tasks.sums:sum_pairs_sft", "reward": "exact", "size": 1000},
        batch={"prompts_per_step": 64, "max_tokens_per_microbatch": 64},
        **{"checkpoint": {"every": 4, "keep_last": 3}, "parallel": {"tp": 2}} | sections,
    )


def progress(root: Path) -> dict:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((root / "run" / "progress.json").read_text())
    return {"steps": -1, "attempt": -1}


def ranks(root: Path) -> list[psutil.Process]:
    torchrun = json.loads((root / "run" / "nodes" / "0.json").read_text())["children"]["trainer"]
    return psutil.Process(torchrun).children()


def learned(root: Path) -> list[dict]:
    rows = read_metrics(root / "run" / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("time")} for row in rows]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tp": 1, "world_size": 2, "distributed_optimizer": True}, id="dp2"),
        pytest.param({"tp": 2, "world_size": 2}, id="tp2", marks=slow),
    ],
)
def test_a_run_whose_ranks_are_killed_ends_as_one_that_was_left_alone(tmp_path, tiny_model_dir, layout):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    code, output = finish(
        start("train", supervised(alone, tiny_model_dir, parallel=layout), "objective=sft")
    )
    assert code == 0, output
    process = start("train", supervised(killed, tiny_model_dir, parallel=layout), "objective=sft")
    for steps, victim in ((3, 1), (14, 0)):  # before the first checkpoint, and after some
        wait_for(lambda steps=steps: progress(killed)["steps"] >= steps, process)
        ranks(killed)[victim].kill()
        restarted = progress(killed)["attempt"]
        wait_for(lambda before=restarted: progress(killed)["attempt"] > before, process)
    code, output = finish(process)
    assert code == 0, output
    assert left_over(tmp_path) == []
    assert learned(killed) == learned(alone)
    mine, other = (tensors(root / "run/checkpoints" / f"step_{STEPS:07d}") for root in (killed, alone))
    assert mine.keys() == other.keys()
    assert all(mine[name].equal(other[name]) for name in mine)


def test_a_hanging_rank_leaves_its_stack_and_is_replaced_and_a_step_can_be_replayed(tmp_path, tiny_model_dir):
    run = {"hang_seconds": 20.0, "steps": 12}
    process = start("train", supervised(tmp_path, tiny_model_dir, run=run), "objective=sft")
    wait_for(lambda: progress(tmp_path)["steps"] >= 5, process)
    ranks(tmp_path)[1].send_signal(signal.SIGSTOP)
    code, output = finish(process)
    assert code == 0, output
    (problem, *_) = read_problems(tmp_path / "run" / "problems.jsonl")
    assert "no step was finished for" in problem["message"]
    # Rank 0 waits in a collective for the stopped one.
    assert "Current thread" in (tmp_path / "run" / "logs" / "trainer-0.log").read_text()
    assert [row["step"] for row in learned(tmp_path)] == list(range(12))
    assert left_over(tmp_path) == []

    code, output = finish(start("replay", tmp_path / "run", "9"))
    assert code == 0, output
    assert "from the checkpoint after 8 steps" in output
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows[9] = json.dumps(json.loads(rows[9]) | {"loss": 0.5})
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    code, output = finish(start("replay", tmp_path / "run", "9"))
    assert code == 1, output
    assert "loss" in output
    code, output = finish(start("replay", tmp_path / "run", "99"))
    assert code == 2, output
    assert "error: step 99 is not in" in output


def test_without_restarts_a_killed_rank_ends_the_run_with_its_reason(tmp_path, tiny_model_dir):
    config = supervised(tmp_path, tiny_model_dir, run={"restarts": 0, "steps": 1000})
    process = start("train", config, "objective=sft")
    wait_for(lambda: progress(tmp_path)["steps"] >= 1, process)
    second = start("train", config, "objective=sft", "resume.mode=auto")
    code, output = finish(second)
    assert code == 2, output
    assert f"error: run.dir={tmp_path}/run: a run is going on in it (process {process.pid}" in output
    ranks(tmp_path)[1].kill()
    code, output = finish(process)
    assert code == 1, output
    assert "the whole story is in" in output
    assert left_over(tmp_path) == []


def test_updates_with_gradients_that_are_too_large_are_skipped_and_end_the_run(tmp_path, tiny_model_dir):
    limits = {"skip_grad_norm": 1e-6, "max_skipped": 3}
    config = supervised(tmp_path, tiny_model_dir, optimizer=limits, parallel={"tp": 1})
    began = time.monotonic()
    code, output = finish(start("train", config, "objective=sft"))
    assert code == 1, output
    assert "3 updates in a row were skipped (optimizer.max_skipped)" in output
    assert "Traceback" not in output
    rows = learned(tmp_path)
    assert [row["skipped_updates"] for row in rows] == [1, 1]
    assert len(read_problems(tmp_path / "run" / "problems.jsonl")) == 3
    assert time.monotonic() - began < 100  # not tried again
