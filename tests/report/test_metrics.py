from __future__ import annotations

import json

import pytest
import torch

from megatron_stare.report import read_metrics
from megatron_stare.report.metrics import MetricsFile, plain, values
from tests.support.disk import no_file_beyond


def steps(path):
    return [row["step"] for row in read_metrics(path)]


def test_lines_can_be_read_while_the_run_goes_on(tmp_path):
    path = tmp_path / "run/metrics.jsonl"
    file = MetricsFile(path, 0)
    file.append({"step": 0, "loss": 0.5})
    assert read_metrics(path) == [{"step": 0, "loss": 0.5}]
    file.close()


def test_a_resumed_run_repeats_no_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    for step in range(10):
        first.append({"step": step, "from": 1.0})
    first.close()
    second = MetricsFile(path, 7)
    assert steps(path) == list(range(7)) == [row["step"] for row in second.rows]
    for step in range(7, 12):
        second.append({"step": step, "from": 2.0})
    second.close()
    assert steps(path) == list(range(12))
    assert values(read_metrics(path), "from") == [1.0] * 7 + [2.0] * 5


def test_half_a_line_of_a_killed_process_is_skipped_and_removed(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "lo')
    assert steps(path) == [0]
    assert "metrics.jsonl:2" in caplog.text
    file = MetricsFile(path, 1)
    file.append({"step": 1})
    file.close()
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_steps_that_a_full_disk_refuses_are_written_once_there_is_room(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.append({"step": 0})
    with no_file_beyond(path.stat().st_size + 5):
        file.append({"step": 1})
        file.append({"step": 2})
        assert path.read_text() == '{"step": 0}\n'
    assert "2 steps wait to be written" in caplog.text
    file.append({"step": 3})
    file.close()
    assert steps(path) == [0, 1, 2, 3] == [row["step"] for row in file.rows]


def test_a_missing_file_is_an_empty_record(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (0.5, 0.5),
        (torch.tensor(2.0), 2.0),
        (torch.tensor(3), 3.0),
        (float("nan"), None),
        (float("inf"), None),
        (torch.tensor(float("nan")), None),
        (None, None),
        (True, True),
    ],
)
def test_values_become_valid_json(value, expected):
    assert plain(value) == expected
    json.loads(json.dumps(plain(value), allow_nan=False))
