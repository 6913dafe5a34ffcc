"""A run that is killed again and again, beside one that is left alone: both must come to the same.

    python -m benchmarks.chaos [--kills N] [--seed S] [--steps N] [--layout dp2|tp2] [--dir DIR]

The run is a real one: two trainer ranks, two SGLang servers, a router, a policy of 0.4M parameters, seeded
sampling. At random moments a trainer rank, torchrun, a server, the router or the whole job is killed
(SIGKILL), the checkpoints' disk is filled, and files are cut or flipped while the job is down.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported

import statistics
import sys
import tempfile
import time
from pathlib import Path

import click
import psutil
import yaml

from benchmarks.chaos_kills import Chaos, Run, checkpoint_disk, tensors, until
from benchmarks.common import note, report

_PATIENCE = 300.0  # seconds until a run that makes no progress is called lost
_STEPS_A_KILL = 5


@click.command()
@click.option("--kills", default=50, show_default=True, help="Disturbances.")
@click.option("--seed", default=0, show_default=True, help="Of their kinds, victims and moments.")
@click.option("--steps", type=int, help=f"Of both runs; default: {_STEPS_A_KILL} a kill, and 20.")
@click.option("--layout", type=click.Choice(["dp2", "tp2"]), default="dp2", help="Of the two ranks.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Default: a temporary one.")
def main(kills: int, seed: int, steps: int | None, layout: str, directory: Path | None) -> None:
    """Print one JSON line: lost, repeated_or_skipped, damaged_loaded, processes_left, mismatches."""
    steps = steps or 20 + _STEPS_A_KILL * kills
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        root = (directory or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        config = _write_config(root, steps, tp=2 if layout == "tp2" else 1)
        note(f"an undisturbed run of {steps} steps")
        alone = Run(config, root / "alone")
        alone.start()
        if alone.process.wait() != 0:
            sys.exit(f"the undisturbed run failed: see {root}/alone.log")
        alone.observe()
        disturbed = Run(config, root / "disturbed")
        with checkpoint_disk(disturbed.root / "checkpoints") as full:
            result = _disturb(disturbed, Chaos(disturbed, seed), kills, steps, full)
            ratios, figures = _compare(alone, disturbed, result, steps)
    report("chaos", ratios, figures)


def _write_config(root: Path, steps: int, tp: int) -> Path:
    from megatron_stare.run.quickstart import CONFIGS, write_policy

    model = root / "policy"
    write_policy(model, seed=0)
    values = {
        "extends": str(CONFIGS / "stare.yaml"),
        "run": {"name": "chaos", "steps": steps, "hang_seconds": 120.0, "restarts": 10},
        "model": {"path": str(model)},
        "task": {"reward": "benchmarks.chaos_kills:reward"},
        "parallel": {"tp": tp, "world_size": 2, "distributed_optimizer": tp == 1},
        "batch": {"prompts_per_step": 4, "responses_per_prompt": 8},
        "optimizer": {"schedule": "constant"},
        "rollout": {
            "servers": 2,
            "seeded": True,
            "health_timeout": 30.0,
            "outage_timeout": 240.0,
            "server_restarts": 1000,
        },
        "evaluation": {"at_end": False},
        "checkpoint": {"every": 5, "keep_last": 3, "at_end": True},
        "report": {"tensorboard": False, "plot_every": 0},
    }
    path = root / "chaos.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


class _Result:
    """What was seen while disturbing."""

    def __init__(self) -> None:
        self.lost = self.damaged_loaded = 0
        self.back_seconds: dict[str, list[float]] = {}
        self.back_steps: list[float] = []
        self.left: list[psutil.Process] = []


def _disturb(run: Run, chaos: Chaos, kills: int, steps: int, full) -> _Result:
    result = _Result()
    run.start()
    if not until(lambda: run.steps > 2, _PATIENCE, run.observe):
        sys.exit(f"the run to be disturbed did not start: see {run.root}.log")
    pace = _pace(run)
    for number in range(kills):
        kind = chaos.draw()
        time.sleep(chaos.wait(3.0 * pace))
        if run.steps >= steps - 2:
            note("the run is at its end; fewer disturbances than asked for")
            break
        before, began = run.steps, time.monotonic()
        hit = _fill_disk(run, full) if kind == "disk" else chaos.kill(kind)
        if kind == "job":
            hit += _restart(run, chaos, result)
            before = 0  # steps since the last checkpoint are made again
        start = before

        def ahead(start: int = start, kind: str = kind) -> bool:
            return run.steps > start and (kind != "job" or run.children() != {})

        came_back = until(ahead, _PATIENCE, run.observe)
        seconds = time.monotonic() - began
        note(f"{number + 1:3d}/{kills} step {run.steps:4d}: {hit}; training again after {seconds:.1f} s")
        if not came_back:
            result.lost += 1
            break
        result.back_seconds.setdefault(kind, []).append(seconds)
        if kind == "server":
            result.back_steps.append(seconds / pace)
    if not until(lambda: run.process.poll() is not None, 10 * _PATIENCE, run.observe):
        result.lost += 1
    elif run.process.returncode != 0:
        result.lost += 1
        note(f"the disturbed run ended with code {run.process.returncode}: see {run.root}.log")
    run.observe()
    until(lambda: not run.left_over(), 10.0)
    result.left += run.left_over()
    result.counts = chaos.counts
    return result


def _pace(run: Run) -> float:
    """Seconds a step, undisturbed, with everything running."""
    first, began = run.steps, time.monotonic()
    until(lambda: run.steps >= first + 5, _PATIENCE, run.observe)
    return (time.monotonic() - began) / max(run.steps - first, 1)


def _fill_disk(run: Run, full) -> str:
    """Keep the checkpoints' disk full until a save has been refused."""
    if full is None:
        return "nothing: no small file system could be mounted here"
    problems = run.root / "problems.jsonl"
    size = problems.stat().st_size if problems.exists() else 0
    with full():
        told = until(lambda: problems.exists() and problems.stat().st_size > size, 60.0, run.observe)
    return "the disk was full" + ("" if told else ", and nobody said so")


def _restart(run: Run, chaos: Chaos, result: _Result) -> str:
    """After the whole job was killed: look what is left of it, damage a file, start it again."""
    until(lambda: not run.left_over(), 10.0)
    result.left += run.left_over()
    checkpoints = run.root / "checkpoints"
    newest = max(checkpoints.glob("step_???????"), default=None)
    path = chaos.damage()
    (run.root / "progress.json").unlink(missing_ok=True)
    run.start()
    until(lambda: (run.root / "progress.json").exists(), _PATIENCE, run.observe)
    if path.startswith("checkpoints/") and run.starting_from == int(newest.name.removeprefix("step_")):
        result.damaged_loaded += 1
    return f", and {path} damaged"


def _compare(alone: Run, disturbed: Run, result: _Result, steps: int) -> tuple[dict, dict]:
    rows = [alone.rows.get(step) != disturbed.rows.get(step) for step in range(steps)]
    missing = sum(step not in disturbed.rows for step in range(steps))
    mismatches = sum(rows) - missing
    before, after = (run.root / "checkpoints" / f"step_{steps:07d}" for run in (alone, disturbed))
    if after.exists():
        mine, other = tensors(before), tensors(after)  # parameters, moments, counts of steps
        mismatches += sum(not mine[name].equal(other[name]) for name in mine)
        mismatches += (before / "run_state.json").read_text() != (after / "run_state.json").read_text()
    ratios = {
        "lost": result.lost,
        "repeated_or_skipped": disturbed.repeated_differently + missing,
        "damaged_loaded": result.damaged_loaded,
        "processes_left": len(result.left),
        "mismatches": mismatches,
    }
    medians = {f"seconds_after_{k}": statistics.median(v) for k, v in result.back_seconds.items()}
    figures = {
        "steps": steps,
        "starts": disturbed.starts,
        **{f"kills_{kind}": count for kind, count in sorted(result.counts.items())},
        **medians,
        "steps_after_server": statistics.median(result.back_steps) if result.back_steps else 0.0,
        "slowest_seconds_after_rank": max(result.back_seconds.get("rank", [0.0])),
    }
    return ratios, figures


if __name__ == "__main__":
    main()
