"""`megatron-stare launch` on a real Slurm: submitted, run on two nodes, signalled, requeued, finished."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_stare.report import read_metrics
from megatron_stare.run.job import API_KEY_VARIABLE
from tests.launch.slurm_cluster import SlurmCluster, missing, wait_for
from tests.support.whole_runs import slow

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(600),
]
_COMMAND = (sys.executable, "-m", "megatron_stare")


@pytest.fixture
def cluster(tmp_path):
    root = tmp_path / "slurm"
    root.mkdir()
    with SlurmCluster(root).running() as running:
        running.environment["OMP_NUM_THREADS"] = "1"
        yield running


def launched(cluster: SlurmCluster, config: Path, *options: str) -> str:
    """Submit the run; the job's number."""
    said = cluster.call(*_COMMAND, "launch", str(config), "--scheduler=slurm", "--nodes=2", *options)
    assert said.startswith("submitted job ")
    return said.split()[2].rstrip(";")


def story(run: Path) -> str:
    """The job's logs, for a failure."""
    logs = [*run.glob("logs/slurm-*"), *run.glob("logs/trainer-*.log")]
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(logs))


def preempt_and_finish(
    cluster: SlurmCluster, run: Path, job: str, signal_options: list[str], seconds: float
) -> None:
    """Signal the job in its midst, and see it through to its end after Slurm started it again."""
    steps = lambda: len(read_metrics(run / "metrics.jsonl"))  # noqa: E731
    wait_for(lambda: steps() >= 3, seconds, lambda: story(run))
    status = json.loads(cluster.call(*_COMMAND, "status", str(run), "--json"))
    assert status["state"] == "running"
    assert [node["state"] for node in status["nodes"]] == ["running"] * 2
    cluster.call("scancel", *signal_options, "--signal=TERM", job)
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", seconds, lambda: story(run))
    (first,) = (run / "checkpoints").glob("step_*")
    done = int(first.name.removeprefix("step_"))
    assert 3 <= done == steps()
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
    wait_for(lambda: cluster.job(job)["JobState"] in ended, seconds, lambda: story(run))
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("COMPLETED", "1"), story(run)
    status = json.loads(cluster.call(*_COMMAND, "status", str(run), "--json"))
    assert (status["state"], status["job"]) == ("done", f"{job}.1")


def running_key(run: Path) -> str:
    """The API key of the job, from the environment of its first supervisor; waits for that."""
    record = run / "nodes" / "0.json"
    wait_for(record.exists, 250, lambda: story(run))
    key = psutil.Process(json.loads(record.read_text())["pid"]).environ()[API_KEY_VARIABLE]
    assert len(key) == 64
    return key


def leftovers(root: Path) -> list[str]:
    """Command lines of living processes that have to do with a directory; after a moment to end in."""
    deadline = time.monotonic() + 10
    while True:
        found = []
        for process in psutil.process_iter(["cmdline", "pid"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(root) in line and process.pid != os.getpid():
                found.append(line)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def check_rows(run: Path, steps: int) -> None:
    """Every step was trained once, over both nodes."""
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(steps))
    assert {log.name for log in run.glob("logs/trainer-*.log")} == {"trainer-0.log", "trainer-1.log"}
    for node in (0, 1):
        assert "starting 1 trainer rank" in next(run.glob(f"logs/slurm-*-node-{node}.log")).read_text()


def test_a_supervised_run_over_two_nodes_is_signalled_requeued_and_finished(cluster, write_config, tmp_path):
    run = tmp_path / "run"
    job = launched(cluster, write_config(run={"steps": 300}))
    # To the steps, that is to every process on both nodes.
    preempt_and_finish(cluster, run, job, [], 150)
    check_rows(run, 300)
    assert leftovers(run) == []


@slow
@pytest.mark.parametrize("trainer_nodes", [1, 2], ids=["served by the other node", "sharing nodes"])
def test_an_rl_run_with_servers_is_signalled_requeued_and_finished(
    cluster, write_config, tmp_path, trainer_nodes
):
    run = tmp_path / "run"
    config = write_config(
        objective="rl",
        run={"steps": 40, "name": "rl"},
        task={
            "source": "megatron_stare.tasks.sums:sum_pairs",
            "size": 100,
            "reward": "tests.launch.rewards:share_of_digits",
        },
        batch={"prompts_per_step": 8},
        rollout={"servers": 2},
    )
    job = launched(cluster, config, f"--trainer-nodes={trainer_nodes}", "--time=1:00:00")
    key = running_key(run)
    # To the batch script alone, as at the end of the job's time.
    preempt_and_finish(cluster, run, job, ["--batch"], 280)
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(40))
    assert max(row["sampler_gap/max"] for row in rows) < 1e-4
    assert all(row["grad_norm"] > 0 for row in rows)
    # Neither the run directory nor Slurm's own files hold the servers' key.
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 50
    assert [file for file in files if key.encode() in file.read_bytes()] == []
    assert {log.name for log in run.glob("logs/server-*.log")} == {"server-0.log", "server-1.log"}
    assert leftovers(run) == []
