"""Signs of life, and what is concluded from their absence."""

from __future__ import annotations

import time

import pytest

from megatron_stare.config.schema import RunSection
from megatron_stare.run.health import Pulse, Restarts, Watchdog, read_progress
from megatron_stare.run.problems import read_problems, record_problem
from tests.support.disk import no_file_beyond


def test_the_progress_file_tells_step_phase_and_pace(tmp_path):
    pulse = Pulse(tmp_path / "progress.json", steps=4, of=10)
    pulse.phase("sampling")
    progress = read_progress(tmp_path / "progress.json")
    assert (progress.steps, progress.of, progress.phase, progress.median_step) == (4, 10, "sampling", None)
    pulse.step(5)
    progress = read_progress(tmp_path / "progress.json")
    assert progress.steps == 5
    assert 0 <= progress.median_step < 60


@pytest.mark.parametrize("content", ["", "{", "[]", '{"steps": 1}', "null"])
def test_a_damaged_progress_file_reads_as_none(tmp_path, content):
    path = tmp_path / "progress.json"
    path.write_text(content)
    assert read_progress(path) is None
    assert Watchdog(RunSection(), path).overdue() is None


def test_a_full_disk_does_not_stop_the_pulse(tmp_path):
    pulse = Pulse(tmp_path / "progress.json", steps=0, of=10)
    with no_file_beyond(1):
        pulse.step(1)
    assert read_progress(tmp_path / "progress.json").steps == 0
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
    pulse.step(2)
    assert read_progress(tmp_path / "progress.json").steps == 2


def test_the_watchdog_waits_for_many_times_the_median_step(tmp_path):
    path = tmp_path / "progress.json"
    pulse = Pulse(path, steps=0, of=10)
    time.sleep(0.1)
    pulse.step(1)
    patient = Watchdog(RunSection(hang_seconds=0.01, hang_factor=1000.0), path)
    strict = Watchdog(RunSection(hang_seconds=0.01, hang_factor=1.5), path)
    time.sleep(0.3)
    assert patient.overdue() is None
    assert "no step was finished" in strict.overdue()
    strict.restarted()
    assert strict.overdue() is None


def test_the_watchdog_never_strikes_before_hang_seconds(tmp_path):
    pulse = Pulse(tmp_path / "progress.json", steps=0, of=10)
    for steps in range(1, 4):
        pulse.step(steps)
    time.sleep(0.05)
    dog = Watchdog(RunSection(hang_seconds=600.0, hang_factor=1.5), tmp_path / "progress.json")
    assert dog.overdue() is None


def test_ranks_are_restarted_as_long_as_they_get_ahead(tmp_path):
    pulse = Pulse(tmp_path / "progress.json", steps=0, of=10)
    restarts = Restarts(2, tmp_path / "progress.json")
    for steps in range(1, 6):
        pulse.step(steps)
        assert restarts.allowed()
    assert restarts.allowed()
    assert not restarts.allowed()
    assert restarts.total == 6


def test_problems_are_kept_in_order_and_half_a_line_is_passed_over(tmp_path, capsys):
    path = tmp_path / "problems.jsonl"
    record_problem(path, "server-0", "was ended by SIGKILL")
    with path.open("a") as file:
        file.write('{"time": 1, "sou\n')
    record_problem(path, "trainer", "a step hangs")
    assert [(p["source"], p["message"]) for p in read_problems(path)] == [
        ("server-0", "was ended by SIGKILL"),
        ("trainer", "a step hangs"),
    ]
    assert "warning: trainer: a step hangs" in capsys.readouterr().out


def test_a_problem_that_cannot_be_written_is_said_all_the_same(tmp_path, capsys):
    record_problem(tmp_path / "missing" / "problems.jsonl", "trainer", "a step hangs")
    assert "a step hangs" in capsys.readouterr().out
