"""What every benchmark shares: its last line, and a description of the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any


def note(text: str) -> None:
    """Progress, for the person who waits."""
    print(text, file=sys.stderr, flush=True)


def report(name: str, ratios: dict[str, float], figures: dict[str, Any]) -> None:
    """Print the result as one JSON line on stdout.

    Args:
        name: of the benchmark.
        ratios: what the benchmark is for; each from one run in which ours and the other alternate.
        figures: absolute numbers behind them, with their unit in the name.
    """
    line = {"benchmark": name, "ratios": _rounded(ratios), "figures": _rounded(figures), "machine": machine()}
    print(json.dumps(line), flush=True)


def machine() -> dict[str, Any]:
    """Cores, memory and versions: without them a figure means nothing."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def alternate(repeats: int, **contestants: Callable[[], None]) -> dict[str, float]:
    """Median seconds of each, run in turn `repeats` times, so that a noisy machine is noisy for all."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            begin = perf_counter()
            run()
            seconds[name].append(perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in values.items()}
