"""Every parallel layout against one process: the same loss, gradients, entropy and reweighted tokens.

    python -m benchmarks.parity [--ranks 8] [--only WORD]

Each layout trains a tiny model for three updates of the clipped objective with STARE, on real processes that
talk over gloo. `worst_relative_error` is the largest over loss, gradient norm, mean entropy and STARE's
thresholds; `selected_set_differences` counts tokens that are reweighted in one of both only. Gradients and
parameters are compared too: see the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.common import note, report
from benchmarks.parity_layouts import LAYOUTS, REFERENCES, Layout, write_models

ROOT = Path(__file__).parents[1]
SECONDS_A_LAYOUT = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8, help="leave out layouts of more processes")
    parser.add_argument("--only", default="", help="layouts whose name contains this word")
    arguments = parser.parse_args()
    chosen = [x for x in LAYOUTS if x.ranks <= arguments.ranks and arguments.only in x.name]
    references = [x for x in REFERENCES if x.name in {layout.reference for layout in chosen}]
    begin = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        models = write_models(out / "models")
        text = TextColumn("{task.description:<36}")
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("starting", total=len(references) + len(chosen))
            for ranks in sorted({x.ranks for x in (*references, *chosen)}):
                layouts = [x for x in (*references, *chosen) if x.ranks == ranks]
                progress.update(bar, description=f"starting {ranks} processes")
                for name in run_layouts(layouts, models, out):
                    progress.update(bar, advance=1, description=name)
                    if not progress.console.is_terminal:
                        note(f"{name}: done")
        rows = {x.name: compare(out, x) for x in chosen}
    for name, row in rows.items():
        note(f"{name:<36} " + "  ".join(f"{key} {value:.1e}" for key, value in row.items()))
    measured = ("loss", "grad_norm", "entropy", "thresholds")
    ratios = {
        "worst_relative_error": max(row[key] for row in rows.values() for key in measured),
        "selected_set_differences": sum(row["selected_differences"] for row in rows.values()),
        "layouts": len(rows),
    }
    figures = {
        "worst_relative_gradient_error": max(row["gradients"] for row in rows.values()),
        "worst_relative_parameter_error": max(row["parameters"] for row in rows.values()),
        "errors": {name: {key: float(f"{v:.3g}") for key, v in row.items()} for name, row in rows.items()},
        "seconds": perf_counter() - begin,
    }
    report("parity", ratios, figures)


def run_layouts(layouts: list[Layout], models: dict[str, Path], out: Path) -> Iterator[str]:
    """Run layouts of one size in turn on the same processes; yields each one's name when it is done.

    Raises RuntimeError with the end of a rank's log if one failed. All processes are gone afterwards.
    """
    ranks = layouts[0].ranks
    jobs = [
        {"name": x.name, "model": str(models[x.model]), "changes": x.changes, "apart": x.apart}
        for x in layouts
    ]
    file = out / f"jobs{ranks}.json"
    file.write_text(json.dumps({"jobs": jobs, "out": str(out)}))
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.parity_ranks", str(file)]
    logs = [out / f"rank{rank}of{ranks}.log" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=log.open("w"),
            text=True,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        yield from (line.strip() for line in processes[0].stdout)
        for process, log in zip(processes, logs, strict=True):
            if process.wait(timeout=SECONDS_A_LAYOUT) != 0:
                raise RuntimeError(f"{log.name} failed:\n{log.read_text()[-3000:]}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare(out: Path, layout: Layout) -> dict[str, float]:
    """Largest relative error of each quantity, and how many tokens are selected in one of both only."""
    names = (layout.name, layout.reference)
    found, wanted = (json.loads((out / f"{name}.json").read_text()) for name in names)
    row = {
        key: relative_error(_flat(found[key]), _flat(wanted[key]))
        for key in ("loss", "grad_norm", "entropy", "thresholds")
    }
    pairs = zip(found["selected"], wanted["selected"], strict=True)
    row["selected_differences"] = sum(len(set(here) ^ set(there)) for here, there in pairs)
    tensors, expected = (torch.load(out / f"{name}.pt") for name in names)
    for key in ("gradients", "parameters"):
        row[key] = tensor_error(tensors[key], expected[key])
    return row


def relative_error(found: list[float], wanted: list[float]) -> float:
    """Largest |found - wanted| / |wanted|."""
    return max(abs(a - b) / abs(b) if a != b else 0.0 for a, b in zip(found, wanted, strict=True))


def tensor_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest |found - wanted| / |wanted| of a tensor, in the Euclidean norm."""
    if found.keys() != wanted.keys():
        raise RuntimeError("other tensors than in one process")
    return max(float((found[name] - x).norm() / x.norm()) for name, x in wanted.items())


def _flat(values: list[Any]) -> list[float]:
    return list(chain.from_iterable(v if isinstance(v, list) else [v] for v in values))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
