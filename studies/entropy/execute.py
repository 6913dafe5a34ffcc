"""Runs the settings, some at a time, each as `megatron-stare train` in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_stare.errors import UserError
from megatron_stare.report import read_metrics
from megatron_stare.run.quickstart import CONFIGS, write_policy
from studies.entropy.settings import Setting
from studies.entropy.summary import summarize

_STUDY = Path(__file__).with_name("study.yaml")


@dataclass
class Study:
    """Where runs write, and where their results are kept.

    A result that exists is not made again; an interrupted run starts anew.
    """

    directory: Path
    results: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _starts: dict[tuple[int, float], threading.Lock] = field(default_factory=dict)

    def run(self, pairs: list[tuple[Setting, int]], jobs: int) -> None:
        """All of them, `jobs` at a time. Raises UserError naming the log of the first that failed."""
        todo = [pair for pair in pairs if not self.result(*pair).exists()]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress, ThreadPoolExecutor(jobs) as pool:
            task = progress.add_task("runs", total=len(pairs), completed=len(pairs) - len(todo))
            futures = [pool.submit(self._one, *pair) for pair in todo]
            try:
                for future in as_completed(futures):
                    progress.console.print(future.result(), highlight=False)
                    progress.advance(task)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def result(self, setting: Setting, seed: int) -> Path:
        """The file of a run's summary and curves."""
        return self.results / f"{setting.name}_seed{seed}.json"

    def _one(self, setting: Setting, seed: int) -> str:
        start = self._start(seed, setting.noise)
        root = self.directory / f"{setting.name}_seed{seed}"
        values = {"optimizer.lr": setting.lr, "run.steps": setting.steps, **setting.values}
        _train(_STUDY, root, seed, start, values)
        record = {
            "method": setting.method,
            "label": setting.label,
            "lr": setting.lr,
            "noise": setting.noise,
            "seed": seed,
            **summarize(read_metrics(root / "metrics.jsonl")),
        }
        self.results.mkdir(parents=True, exist_ok=True)
        aside = self.result(setting, seed).with_suffix(".partial")
        aside.write_text(json.dumps(record), encoding="utf-8")
        aside.rename(self.result(setting, seed))
        return f"{setting.name} seed {seed}: entropy {record['entropy']:.3f}, reward {record['reward']:.3f}"

    def _start(self, seed: int, noise: float) -> Path:
        """The policy after its supervised warm-up, made once for each seed and noise."""
        with self._lock:
            lock = self._starts.setdefault((seed, noise), threading.Lock())
        with lock:
            model = self.directory / f"policy-{seed}"
            with self._lock:
                if not (model / "config.json").exists():
                    write_policy(model, seed)
            root = self.directory / f"warm-up-{seed}-{noise:g}"
            values = {"task.source_args": {"noise": noise}, "parallel.tp": 1}
            if not (root / "hf").is_dir():
                _train(CONFIGS / "sft.yaml", root, seed, model, values)
            return root / "hf"


def _train(config: Path, root: Path, seed: int, model: Path, values: dict) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    values = {"run.dir": str(root), "run.seed": seed, "model.path": str(model), **values}
    overrides = [f"{key}={_yaml(value)}" for key, value in values.items()]
    log = root.with_name(f"{root.name}.log")  # names hold dots
    with log.open("w") as output:
        command = [sys.executable, "-m", "megatron_stare", "train", str(config), *overrides]
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise UserError(f"a run ended with code {code}; see {log}")


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]  # without the document's end
