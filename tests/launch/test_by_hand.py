"""A job without a scheduler: the written script, started on two nodes, both of which are this machine."""

from __future__ import annotations

import os
import socket
import subprocess

from megatron_stare.cli import run
from megatron_stare.report import read_metrics
from megatron_stare.run.job import PORTS_PER_JOB
from megatron_stare.run.status import read_status


def free_ports() -> int:
    """The first of as many free ports as a job has, outside of what other tests choose from."""
    for first in range(32_000, 32_700, PORTS_PER_JOB):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", first)) != 0:
                return first
    raise AssertionError("no free ports")


def test_two_nodes_started_by_hand_train_one_model(write_config, tmp_path):
    config = write_config(run={"steps": 5})
    options = ("--scheduler=torchrun", "--nodes=2", "--hosts=127.0.0.1,127.0.0.1", f"--port={free_ports()}")
    assert run(["launch", str(config), *options]) == 0
    script = tmp_path / "run" / "launch" / "node.sh"
    # The second one first: it waits for the head.
    nodes = [
        subprocess.Popen(
            [str(script), str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        for index in (1, 0)
    ]
    try:
        output = [node.communicate(timeout=250)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], output
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(5))
    assert {log.name for log in tmp_path.glob("run/logs/trainer-*")} == {"trainer-0.log", "trainer-1.log"}
    status = read_status(tmp_path / "run")
    assert (status.state, [node.state for node in status.nodes]) == ("done", ["done", "done"])
