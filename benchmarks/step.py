"""What a step costs: with STARE against without, and ours against TRL's.

    python -m benchmarks.step [--repeats N] [--rounds N] [--model NAME ...]

`stare_on_over_off`: one engine and one batch take training steps (log-probs and entropy, gate, thresholds,
weights, update) in turn with STARE and without it; the median of the ratio of neighbours. The model is the
quickstart's, of 0.4M parameters: the larger a model, the less STARE's share.

`tokens_per_second_over_trl`: whole RL steps, with sampling, of the same tiny Qwen3 model on the same prompts
with the same limits, by `megatron-stare train` with a real SGLang server, and by TRL's GRPOTrainer; runs of
one and the other alternate. TRL has all cores for its one process. Needs `pip install --no-deps trl==1.16.0`.
The ratio is that of a model of 19M parameters, whose time goes into its matrix products as any larger one's
does. Of the quickstart's own model, where either program mostly waits for Python, it is
`tokens_per_second_over_trl_quickstart`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# As a trainer rank has it (run/supervisor.py), and read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import click

from benchmarks.common import note, report

PROMPTS, RESPONSES, RESPONSE_TOKENS = 16, 16, 64
MODELS = {
    "19M": {"layers": 6, "hidden": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 1536},
    "quickstart": {"layers": 3, "hidden": 96, "heads": 4, "kv_heads": 4, "head_dim": 24, "ffn": 256},
}
STEPS = {"19M": 8, "quickstart": 12}  # of a run of either trainer
WARM_UP = 4  # of those: not counted


@click.command()
@click.option("--repeats", default=40, show_default=True, help="Training steps with and without STARE.")
@click.option("--rounds", default=2, show_default=True, help="Runs of each trainer; 0: no comparison.")
@click.option("--model", "names", type=click.Choice(list(MODELS)), multiple=True, default=tuple(MODELS))
def main(repeats: int, rounds: int, names: tuple[str, ...]) -> None:
    """Print one JSON line: stare_on_over_off, tokens_per_second_over_trl."""
    if rounds and importlib.util.find_spec("trl") is None:
        raise click.UsageError(
            "the package trl is not installed: pip install --no-deps trl==1.16.0, or --rounds 0"
        )
    with tempfile.TemporaryDirectory(prefix="benchmark-step-") as scratch:
        ratios, figures = {}, {}
        for name in names if rounds else ():
            suffix = "" if name == "19M" else f"_{name}"
            rates = compare_trainers(name, Path(scratch, name), rounds)
            ratios[f"tokens_per_second_over_trl{suffix}"] = rates["ours"] / rates["trl"]
            figures |= {f"{of}_tokens_per_second{suffix}": rate for of, rate in rates.items()}
        seconds = compare_stare(Path(scratch, "stare"), repeats)
        ratios["stare_on_over_off"] = seconds.pop("ratio")
        report("step", ratios, figures | seconds)


def write_model(name: str, scratch: Path) -> Path:
    """A tiny Qwen3 with the sums task's tokenizer, untrained: responses end by chance."""
    from megatron_stare.tasks import load_tokenizer
    from megatron_stare.tasks.sums import VOCABULARY, write_tokenizer
    from megatron_stare.weights import write_tiny_checkpoint

    write_tokenizer(scratch / "tokenizer")
    return write_tiny_checkpoint(
        scratch / "model",
        vocab_size=len(VOCABULARY),
        tokenizer=load_tokenizer(scratch / "tokenizer"),
        **MODELS[name],
    )


# --- with and without STARE -----------------------------------------------------------------------------


def compare_stare(scratch: Path, repeats: int) -> dict[str, float]:
    """Median seconds of a training step with and without STARE, and the median ratio of neighbours."""
    from megatron_stare.engine.device import current
    from megatron_stare.engine.engine import Engine
    from megatron_stare.engine.parallel import initialize
    from megatron_stare.run.files import RunFiles
    from megatron_stare.run.session import Session
    from megatron_stare.run.state import RunState

    model = write_model("quickstart", scratch)
    configs = {name: _config(model, name == "on") for name in ("on", "off")}
    engine = Engine(configs["on"], current(), initialize(current(), tp=1, pp=1))
    roles = ("source", "publisher", "reporter", "keeping", "pulse")
    parts = dict.fromkeys(roles) | {"state": RunState(), "bound": {}}
    sessions = {name: Session(config, engine, RunFiles(scratch), **parts) for name, config in configs.items()}
    groups = _groups()
    times: dict[str, list[float]] = {name: [] for name in sessions}
    note(f"{repeats} training steps with STARE and without")
    for number in range(repeats + 2):
        # Each goes first as often as the other.
        for name in ("on", "off") if number % 2 else ("off", "on"):
            begin = time.perf_counter()
            _training_step(sessions[name], groups)
            times[name].append(time.perf_counter() - begin)
    on, off = times["on"][2:], times["off"][2:]
    ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
    return {
        "ratio": ratio,
        "step_with_stare_seconds": statistics.median(on),
        "step_without_seconds": statistics.median(off),
    }


def _training_step(session: Any, groups: list) -> None:
    """The loop of run/trainer.py between sampling and publishing."""
    batch = session.distribute_groups(groups)
    signals = session.measure(batch)
    decision = session.decide(signals)
    session.learn(batch, signals, decision)


def _config(model: Path, stare: bool) -> Any:
    from megatron_stare.config import Config

    return Config.model_validate(
        {
            "run": {"steps": 1000},
            "model": {"path": str(model), "dtype": "float32", "vocab_multiple": 8},
            "task": {"source": "unused.jsonl", "max_prompt_tokens": 8},
            "optimizer": {"lr": 1e-6},
            "batch": {"prompts_per_step": PROMPTS, "responses_per_prompt": RESPONSES},
            "rollout": {"max_response_tokens": RESPONSE_TOKENS, "context_length": 128},
            # Always open, with weights that move: every part of STARE has work to do.
            "stare": {"enabled": stare, "rule": "c2", "gate": "off", "schedule": "pi", "W_max": 10.0},
        }
    )


def _groups() -> list:
    import random

    from megatron_stare.tasks.sample import Group, Prompt, Response

    rng = random.Random(0)

    def response() -> Response:
        length = rng.randint(RESPONSE_TOKENS // 4, RESPONSE_TOKENS)
        ids = [rng.randrange(12) for _ in range(length)]
        return Response(ids, [-2.7] * length, "stop", 0, reward=float(rng.random() < 0.5))

    return [
        Group(Prompt(i, [rng.randrange(10) for _ in range(3)], "", 0), [response() for _ in range(RESPONSES)])
        for i in range(PROMPTS)
    ]


# --- ours and TRL's -------------------------------------------------------------------------------------


def compare_trainers(name: str, scratch: Path, rounds: int) -> dict[str, float]:
    """Response tokens a second of each: the median over runs of tokens over seconds of the counted steps."""
    model = write_model(name, scratch)
    rates: dict[str, list[float]] = {"ours": [], "trl": []}
    contestants = {"ours": _run_ours, "trl": _run_trl}
    for number, (who, run) in itertools.product(range(rounds), contestants.items()):
        rows = run(model, scratch / f"{who}-{number}", STEPS[name])[WARM_UP:]
        rates[who].append(sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows))
        note(f"{name}, {who}, run {number + 1} of {rounds}: {rates[who][-1]:.0f} tokens/s")
    return {who: statistics.median(values) for who, values in rates.items()}


def _run_ours(model: Path, directory: Path, steps: int) -> list[dict[str, float]]:
    from megatron_stare.report import read_metrics

    config = Path(__file__).parents[1] / "configs" / "quickstart" / "stare.yaml"
    cores = len(os.sched_getaffinity(0))
    values = {
        "run.dir": directory,
        "run.steps": steps,
        "model.path": model,
        # As many processes as TRL has threads, for sampling and for training.
        "rollout.servers": cores,
        "parallel.tp": 1,
        "parallel.world_size": cores,
        "batch.prompts_per_step": PROMPTS,
        "batch.responses_per_prompt": RESPONSES,
        "rollout.max_response_tokens": RESPONSE_TOKENS,
        "rollout.context_length": 128,
        "rollout.max_total_tokens": 65536,
        "evaluation.at_end": "false",
        "report.tensorboard": "false",
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    _call([sys.executable, "-m", "megatron_stare", "train", str(config), *overrides])
    rows = read_metrics(directory / "metrics.jsonl")
    return [{"tokens": row["tokens"], "seconds": row["time/step"]} for row in rows]


def _run_trl(model: Path, directory: Path, steps: int) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "benchmarks.trl_steps", str(model), str(directory), str(steps)]
    output = _call(command, OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))))
    return json.loads(output.splitlines()[-1])


def _call(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
