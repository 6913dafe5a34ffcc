"""A run directory in which things are cut, flipped, missing or left over: what is said, and what is saved."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from benchmarks.chaos_kills import tensors
from megatron_stare.errors import UserError
from megatron_stare.report import read_metrics
from megatron_stare.run.files import RunFiles
from megatron_stare.run.health import read_progress
from megatron_stare.run.node import read_node
from megatron_stare.run.problems import read_problems
from megatron_stare.run.state import RunState
from megatron_stare.weights import publication
from tests.run.test_survival import learned, supervised
from tests.support.whole_runs import finish, left_over, start


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model_dir) -> Path:
    """A supervised run of ten steps with checkpoints after 4, 8 and 10; not to be written to."""
    root = tmp_path_factory.mktemp("finished")
    config = supervised(root, tiny_model_dir, run={"steps": 10}, parallel={"tp": 1})
    code, output = finish(start("train", config, "objective=sft"))
    assert code == 0, output
    return root


@pytest.fixture
def run(finished, tmp_path, tiny_model_dir) -> Path:
    """A copy of it, with a config of its own."""
    shutil.copytree(finished / "run", tmp_path / "run")
    supervised(tmp_path, tiny_model_dir, run={"steps": 10}, parallel={"tp": 1})
    return tmp_path


def resume(root: Path, *overrides: str) -> tuple[int, str]:
    return finish(start("train", root / "config.yaml", "objective=sft", "resume.mode=auto", *overrides))


def test_all_that_can_be_recovered_is_and_the_rest_is_learned_again(run, finished):
    files = RunFiles(run / "run")
    newest, before = (files.checkpoints / publication.directory_name(step) for step in (10, 8))
    data = next(newest.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-7])
    (before / "run_state.json").write_text("{")
    (files.checkpoints / "step_0000012.tmp").mkdir()
    files.metrics.write_bytes(files.metrics.read_bytes()[:-20])
    files.progress.write_bytes(b"\xff\xff")
    files.outcome.write_text('{"outcome": "fai')
    files.stop_request.touch()
    (files.nodes / "0.json").write_text("")
    (run / "run" / "summary.md").unlink()
    code, output = resume(run)
    assert code == 0, output
    assert f"step_0000010 is not used: {data.name} has" in output
    assert "step_0000008 is not used: run_state.json has 1 bytes instead of" in output
    assert sorted(path.name for path in files.checkpoints.iterdir()) == [
        "step_0000004",
        "step_0000008",
        "step_0000008.damaged",
        "step_0000010",
        "step_0000010.damaged",
    ]
    assert learned(run) == learned(finished)
    mine, other = (tensors(root / "run/checkpoints/step_0000010") for root in (run, finished))
    assert all(mine[name].equal(other[name]) for name in other)
    assert {problem["source"] for problem in read_problems(files.problems)} == {"checkpoint"}
    assert left_over(run) == []


def test_a_run_none_of_whose_checkpoints_is_good_never_starts_at_the_beginning(run):
    files = RunFiles(run / "run")
    for _, path in publication.published(files.checkpoints):
        (path / publication.MANIFEST).unlink()
    for _ in range(2):  # also when they have been set aside
        code, output = resume(run)
        assert code == 2, output
        assert f"error: no checkpoint in {files.checkpoints} is good" in output
        assert "Traceback" not in output
    assert len(publication.damaged(files.checkpoints)) == 3


def test_a_changed_config_is_refused_by_name_and_goes_on_where_it_is_allowed(run):
    code, output = resume(run, "run.steps=11", "optimizer.lr=0.002")
    assert code == 2, output
    assert "error: optimizer.lr=0.002 is not what step_0000010 was saved with" in output
    code, output = resume(run, "run.steps=11", "optimizer.lr=0.002", "resume.allow=[optimizer.lr]")
    assert code == 0, output
    assert [row["lr"] for row in learned(run)][-2:] == [0.001, 0.002]


def test_a_lock_that_cannot_be_taken_is_a_word_and_no_traceback(run):
    lock = RunFiles(run / "run").lock
    lock.unlink()
    lock.mkdir()
    code, output = resume(run)
    assert code == 2, output
    assert "error: run.dir=" in output and "run.lock" in output
    assert "Traceback" not in output


METRICS = {
    "cut": lambda data: data[:-20],
    "empty": lambda data: b"",
    "binary in between": lambda data: b"\xff\x00\xfe\n" + data,
    "lines of another kind": lambda data: b"[1]\n3\nnull\n" + data,
    "no line's end": lambda data: data.rstrip(b"\n"),
}


@pytest.mark.parametrize("damage", METRICS.values(), ids=list(METRICS))
def test_damaged_metrics_lose_no_more_than_the_damaged_lines(finished, tmp_path, damage):
    original = finished / "run" / "metrics.jsonl"
    (tmp_path / "metrics.jsonl").write_bytes(damage(original.read_bytes()))
    found, whole = read_metrics(tmp_path / "metrics.jsonl"), read_metrics(original)
    kept = {"cut": 9, "empty": 0}.get(next(name for name, d in METRICS.items() if d is damage), 10)
    assert found == whole[:kept]


RECORDS = ["", "{", "[]", "null", "\0\0", '{"unknown": 1}']


@pytest.mark.parametrize("content", RECORDS)
def test_damaged_signs_of_life_read_as_none(tmp_path, content):
    files = RunFiles(tmp_path)
    files.nodes.mkdir()
    for path in (files.progress, files.nodes / "0.json", files.problems):
        path.write_text(content)
    assert read_progress(files.progress) is None
    assert read_node(files, 0).get("job") is None
    assert read_problems(files.problems) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "run state of format 1, this version reads"),
        ({"format": 99}, "run state of format 99"),
        ({"format": None}, "run state of format None"),
        ({"more": 1}, "unknown or missing parts"),
    ],
)
def test_a_run_state_of_another_version_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        RunState.from_json(RunState(steps=3).to_json() | change, "step_0000003")


def test_files_of_another_owner_are_named(finished, tmp_path):
    path = tmp_path / "step_0000010"
    shutil.copytree(finished / "run" / "checkpoints" / "step_0000010", path)
    data = next(path.glob("*.distcp"))
    data.chmod(0)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(0o755)
    fork = multiprocessing.get_context("fork")
    answer = fork.SimpleQueue()

    def look_as_another() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        answer.put(publication.find_damage(path))

    process = fork.Process(target=look_as_another)
    process.start()
    process.join(30)
    assert answer.get() == f"{data.name} cannot be read (Permission denied)"


