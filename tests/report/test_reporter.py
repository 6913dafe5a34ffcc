from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_stare.config.schema import Config
from megatron_stare.report import Reporter, read_metrics
from megatron_stare.report.sinks import WANDB_ID_FILE, wandb_mode


def make_config(**report) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "task": {"source": "a.jsonl"},
            "run": {"name": "demo", "steps": 10},
            "report": {"tensorboard": False, "plot_every": 4} | report,
        }
    )


def metrics(step: int) -> dict:
    return {
        "entropy": torch.tensor(1 / (step + 1)),
        "reward/mean": step / 10,
        "loss": float("nan") if step == 2 else -0.1,
        "stare/open": step > 3,
        "time/sample": 0.5,
    }


def report(config: Config, run_dir: Path, start: int, end: int, outcome: str) -> str:
    stream = io.StringIO()
    reporter = Reporter(config, run_dir, 10, start, stream=stream)
    for step in range(start, end):
        reporter.status("sampling")
        reporter.step(step, metrics(step))
    reporter.close(outcome)
    return stream.getvalue()


def test_a_run_leaves_metrics_picture_and_summary(tmp_path):
    shown = report(make_config(), tmp_path, 0, 10, "done")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["entropy.png", "metrics.jsonl", "summary.md"]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(10))
    assert rows[2]["loss"] is None
    assert all(row["time/step"] >= 0 for row in rows)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert len([line for line in shown.splitlines() if line.startswith("step ")]) == 10
    assert "demo: done" in shown
    assert "`summary.md`" in (tmp_path / "summary.md").read_text()


def test_the_picture_appears_while_the_run_goes_on(tmp_path):
    reporter = Reporter(make_config(), tmp_path, 10, 0, stream=io.StringIO())
    for step in range(4):
        assert not (tmp_path / "entropy.png").exists()
        reporter.step(step, metrics(step))
    assert (tmp_path / "entropy.png").exists()
    reporter.close("failed")


def test_a_resumed_run_goes_on_where_its_checkpoint_was(tmp_path):
    report(make_config(), tmp_path, 0, 8, "preempted")
    report(make_config(), tmp_path, 6, 10, "done")
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(10))
    assert "| steps | 10 of 10 |" in (tmp_path / "summary.md").read_text()


def test_closing_twice_and_without_a_step_is_harmless(tmp_path):
    reporter = Reporter(make_config(), tmp_path, 10, 0, stream=io.StringIO())
    assert reporter.close("failed").outcome == "failed"
    assert reporter.close("done") is None
    assert "demo: failed" in (tmp_path / "summary.md").read_text()


def test_tensorboard_hides_the_steps_that_a_resume_repeats(tmp_path):
    config = make_config(tensorboard=True)
    report(config, tmp_path, 0, 8, "preempted")
    report(config, tmp_path, 6, 10, "done")
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert {"entropy", "reward/mean", "time/sample"} <= set(events.Tags()["tensors"])
    assert [event.step for event in events.Tensors("entropy")] == list(range(10))
    assert 2 not in [event.step for event in events.Tensors("loss")]


@pytest.mark.timeout(120)
def test_wandb_is_written_offline_and_resumes_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = make_config(wandb=True)
    report(config, tmp_path, 0, 2, "preempted")
    run_id = (tmp_path / WANDB_ID_FILE).read_text().strip()
    report(config, tmp_path, 2, 3, "done")
    assert (tmp_path / WANDB_ID_FILE).read_text().strip() == run_id
    runs = [p for p in (tmp_path / "wandb").iterdir() if p.name.startswith("offline-run-")]
    assert runs and all(p.name.endswith(run_id) for p in runs)


@pytest.mark.parametrize(
    ("environment", "netrc_host", "mode"),
    [
        ({}, None, "offline"),
        ({"WANDB_API_KEY": "k" * 40}, None, "online"),
        ({}, "api.wandb.ai", "online"),
        ({}, "example.org", "offline"),
        ({"WANDB_BASE_URL": "https://wandb.example.org"}, "wandb.example.org", "online"),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "disabled"}, None, "disabled"),
    ],
)
def test_wandb_is_online_only_for_who_is_logged_in(tmp_path, monkeypatch, environment, netrc_host, mode):
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "netrc"
    if netrc_host:
        file.write_text(f"machine {netrc_host}\n  login user\n  password secret\n")
        file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wandb_mode() == mode


def test_a_service_that_cannot_be_opened_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "no-such-mode")
    report(make_config(wandb=True), tmp_path, 0, 2, "done")
    assert "no metrics go to wandb" in caplog.text
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
