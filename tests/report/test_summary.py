from __future__ import annotations

import pytest

from megatron_stare.config.schema import Config
from megatron_stare.report import fifths, summarise
from megatron_stare.report.summary import markdown, time_split, tokens_per_second


@pytest.fixture
def config() -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "task": {"source": "a.jsonl"},
            "run": {"name": "demo", "steps": 10},
            "batch": {"prompts_per_step": 2, "responses_per_prompt": 4},
        }
    )


def rows() -> list[dict]:
    return [
        {
            "step": s,
            "reward/mean": s / 10,
            "entropy": 0.3,
            "response/length": 10.0,
            "stare/open": s >= 5,
            "reward/errors": 1 if s == 3 else 0,
            "time/sample": 3.0,
            "time/learn": 1.0,
            "time/step": 5.0,
        }
        for s in range(10)
    ]


def test_fifths_are_means_of_the_ends():
    assert fifths(rows(), "reward/mean") == pytest.approx((0.05, 0.85))
    assert fifths(rows()[:1], "reward/mean") == (0.0, 0.0)
    assert fifths([], "entropy") is None
    assert fifths(rows(), "absent") is None


def test_time_is_split_by_phase_and_the_rest_is_other():
    assert time_split(rows()) == [("sample", 0.6), ("learn", 0.2), ("other", 0.2)]
    assert time_split([]) == []


def test_speed_is_of_response_tokens_over_whole_steps(config):
    assert tokens_per_second(rows(), config) == 10 * 8 / 5
    assert tokens_per_second([{"step": 0, "tokens": 70, "time/step": 10.0}], config) == 7.0
    assert tokens_per_second([{"step": 0, "tokens": 70}], config) is None


def test_the_page_tells_what_happened(config, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    page = markdown(summarise(rows(), config, "done", tmp_path))
    for text in (
        "# demo: done",
        "| steps | 10 of 10 |",
        "| STARE's gate open | 50% of the steps |",
        "| reward errors | 1 |",
        "| reward | 0.05 | 0.85 |",
        "| speed | 16 response tokens/s |",
        "sample 60%, learn 20%, other 20%",
        "- `checkpoints/`",
        "- `metrics.jsonl`",
    ):
        assert text in page


def test_a_run_without_a_step_has_a_page_too(config, tmp_path):
    assert "| steps | 0 of 10 |" in markdown(summarise([], config, "failed", tmp_path / "none"))
