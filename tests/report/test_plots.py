from __future__ import annotations

import math

import pytest

from megatron_stare.report import plot_comparison, plot_entropy
from megatron_stare.report.plots import open_spans, running_mean

PNG = b"\x89PNG\r\n\x1a\n"


def run(steps: int, **extra) -> list[dict]:
    return [
        {"step": s, "entropy": math.exp(-s / 10), "reward/mean": s / steps, "stare/open": s > 5, **extra}
        for s in range(steps)
    ]


@pytest.mark.parametrize(
    "rows",
    [
        run(60),
        run(1),
        [{"step": 0, "entropy": None, "reward/mean": 0.5}],
        [{"step": s, "loss": 1 / (s + 1)} for s in range(5)],
        [r | {"stare/W": 1 + r["step"] / 9, "stare/M": 1 - r["step"] / 99} for r in run(50)],
        [{"step": 0, "entropy": None}, *run(3)[1:]],
        [r | {"eval/reward": 0.5} if r["step"] % 5 == 0 else r for r in run(20)],
    ],
    ids=["rl", "one step", "no entropy", "supervised", "moving weights", "gap", "evaluated"],
)
def test_a_picture_is_drawn_from_whatever_was_recorded(tmp_path, rows):
    path = tmp_path / "new/entropy.png"
    assert plot_entropy(rows, path, title="a run", target=0.3)
    assert path.read_bytes().startswith(PNG)
    assert [p.name for p in path.parent.iterdir()] == ["entropy.png"]


@pytest.mark.parametrize("rows", [[], [{"step": 0}], [{"step": 0, "entropy": None}]])
def test_nothing_to_draw_writes_nothing(tmp_path, rows):
    assert not plot_entropy(rows, tmp_path / "entropy.png", title="a run")
    assert list(tmp_path.iterdir()) == []


def test_several_runs_on_one_picture(tmp_path):
    path = tmp_path / "comparison.png"
    runs = {"GRPO": run(60), "STARE": run(80, **{"reward/distinct_right": 3.0}), "broken": []}
    plot_comparison(runs, 0.3, path)
    assert path.read_bytes().startswith(PNG)


def test_an_old_picture_stays_when_drawing_fails(tmp_path):
    path = tmp_path / "entropy.png"
    plot_entropy(run(3), path, title="a run")
    before = path.read_bytes()
    with pytest.raises((TypeError, ValueError)):
        plot_entropy([{"step": 0, "entropy": "text"}], path, title="a run")
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_open_spans_are_stretches_of_open_steps():
    flags = [1, 1, 0, None, 1, 0, 1]
    assert open_spans([{"step": s, "stare/open": f} for s, f in enumerate(flags)]) == [(0, 1), (4, 4), (6, 6)]
    assert open_spans([{"step": 0}]) == []


def test_running_mean_keeps_length_and_level():
    assert running_mean([1.0] * 7, 2) == [1.0] * 7
    assert running_mean([0.0, 3.0, 6.0], 1) == [1.5, 3.0, 4.5]
