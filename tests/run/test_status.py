"""`megatron-stare status`: what it says of runs that live, ended or died, and of directories in any state."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_stare.cli import run
from megatron_stare.errors import UserError
from megatron_stare.run.status import SILENT_SECONDS, read_status


def node(directory: Path, number: int = 0, **changes) -> None:
    """A node's record as its supervisor writes it; of this process, just now, where nothing else is said."""
    now = time.time()
    record = {
        "job": "12.0", "node": number, "host": socket.gethostname(), "pid": os.getpid(), "started": now - 100,
        "heartbeat": now, "state": "running", "message": "", "children": {"trainer": 77}, "restarts": 2,
    } | changes  # fmt: skip
    (directory / "nodes").mkdir(exist_ok=True)
    (directory / "nodes" / f"{number}.json").write_text(json.dumps(record))


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A run of two nodes in its fifth of ten steps, with a checkpoint and a survived problem."""
    node(tmp_path)
    node(tmp_path, 1)
    now = time.time()
    progress = {"steps": 4, "of": 10, "phase": "sampling", "phase_since": now - 3, "step_since": now - 5}
    (tmp_path / "progress.json").write_text(json.dumps(progress))
    rows = [{"step": step, "time/step": seconds} for step, seconds in enumerate((9.0, 2.0, 2.0, 4.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for steps in (2, 4):
        (tmp_path / "checkpoints" / f"step_{steps:07d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_0000006.writing").mkdir()
    problem = {"time": now - 60, "host": "n1", "source": "server-1", "message": "was ended by SIGKILL"}
    (tmp_path / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    (tmp_path / "config.yaml").write_text("run: {steps: 10}\n")
    return tmp_path


def test_a_living_run_tells_where_it_is_and_what_it_does(running, capsys):
    status = read_status(running)
    assert (status.state, status.well, status.job) == ("running", True, "12.0")
    assert (status.steps, status.of, status.phase) == (4, 10, "sampling")
    assert status.phase_seconds == pytest.approx(3, abs=1)
    assert status.step_seconds == 3.0
    assert [steps for steps, _ in status.checkpoints] == [2, 4]
    assert [(n.node, n.alive, n.children) for n in status.nodes] == [
        (0, True, {"trainer": 77}),
        (1, True, {"trainer": 77}),
    ]
    assert run(["status", str(running)]) == 0
    shown = capsys.readouterr().out
    for text in (
        "running", "4 of 10", "sampling for 3.", "18 s left", "after 4 steps", f"supervisor {os.getpid()}",
        "trainer 77", "1 min ago, server-1 on n1: was ended by SIGKILL",
    ):  # fmt: skip
        assert text in shown, text


def test_json_holds_the_same_for_programs(running, capsys):
    assert run(["status", str(running), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["steps"], told["nodes"][1]["pid"]) == ("running", 4, os.getpid())
    assert told["problems"][0]["source"] == "server-1"


def test_a_supervisor_that_is_gone_is_found_at_once_on_its_own_host(running):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    node(running, pid=gone.pid)
    status = read_status(running)
    assert (status.state, status.well) == ("dead", False)
    assert str(gone.pid) in status.message
    assert run(["status", str(running)]) == 1


def test_on_other_hosts_silence_tells(running):
    node(running, host="elsewhere", pid=1, heartbeat=time.time() - SILENT_SECONDS / 2)
    assert read_status(running).state == "running"
    node(running, host="elsewhere", pid=1, heartbeat=time.time() - SILENT_SECONDS * 2)
    assert read_status(running).state == "dead"
    node(running)
    node(running, 1, host="elsewhere", heartbeat=time.time() - SILENT_SECONDS * 2)
    status = read_status(running)
    assert (status.state, status.message) == ("running", "no sign of life from node 1")


@pytest.mark.parametrize(
    ("state", "code"), [("done", 0), ("preempted", 0), ("failed", 1), ("stopped", 1), ("refused", 1)]
)
def test_a_run_that_has_ended_tells_how(state, code, running, capsys):
    node(running, state=state, message="4 of 10 steps", heartbeat=time.time() - 5000)
    assert run(["status", str(running)]) == code
    assert f"{state}: 4 of 10 steps" in capsys.readouterr().out


def test_ranks_that_ended_in_order_under_a_supervisor_that_was_killed_count_as_ended(running):
    node(running, heartbeat=time.time() - 5000)
    (running / "outcome.json").write_text('{"outcome": "done", "message": "10 of 10 steps", "rank": 0}')
    assert read_status(running).state == "done"


def test_records_of_an_earlier_job_on_more_nodes_are_left_out(running):
    node(running, 2, job="11.0")
    assert [n.node for n in read_status(running).nodes] == [0, 1]


def test_a_directory_without_a_run_is_bad_usage(tmp_path, capsys):
    assert run(["status", str(tmp_path)]) == 2
    assert "no run is there" in capsys.readouterr().err
    with pytest.raises(UserError):
        read_status(tmp_path / "none")


def test_the_end_of_a_long_record_is_enough(running):
    with (running / "metrics.jsonl").open("w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step, "time/step": 1.5, "padding": "x" * 60}) + "\n")
    (running / "progress.json").unlink()
    status = read_status(running)
    assert (status.steps, status.step_seconds) == (20_000, 1.5)


_WRONG = [
    b"", b"{", b"[]", b"null", b"\xff\xfe\x00",
    b'{"state": 5, "pid": "x", "heartbeat": "now", "started": [], "children": 3}',
    b'{"steps": "many", "of": -1, "phase": {}, "phase_since": null}',
    b'{"heartbeat": 1e400, "pid": 1e300, "started": -5}',
    b'{"time": {}, "source": 1, "message": null}', b"[" * 100_000, b'{"outcome": ["done"], "message": 3}',
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_no_damage_to_its_files_ends_in_a_traceback(running, seed, capsys):
    chosen = random.Random(seed)
    files = [path for path in running.rglob("*") if path.is_file()]
    for path in chosen.sample(files, chosen.randint(1, len(files))):
        kind = chosen.randrange(4)
        if kind == 0:
            path.write_bytes(path.read_bytes()[: chosen.randrange(path.stat().st_size)])
        elif kind == 1:
            path.write_bytes(chosen.choice(_WRONG))
        elif kind == 2:
            path.unlink()
            path.mkdir()
        else:
            content = bytearray(path.read_bytes())
            for _ in range(5):
                content[chosen.randrange(len(content))] = chosen.randrange(256)
            path.write_bytes(bytes(content))
    for options in ([], ["--json"]):
        assert run(["status", str(running), *options]) in (0, 1)
        output = capsys.readouterr()
        assert output.out
        assert output.err == ""
