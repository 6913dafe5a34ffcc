"""What an asynchronous save costs training, against the same save that training waits for.

    python -m benchmarks.checkpoint [--repeats N] [--dir DIR]

One process trains a model of 74M parameters in float32: files of 737 MB with Adam's moments. Bursts of
training steps alternate: without a save, with one in the background that is published within the burst, and
with one that is waited for. The stall is what a burst takes longer than one without a save: the call, the
steps that the writer slows down, the poll that publishes. Both kinds write the same files with the same
checksums.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as a trainer rank has it

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.common import note, report

SHAPE = {"layers": 8, "hidden": 768, "heads": 12, "kv_heads": 4, "head_dim": 64, "ffn": 2304}
VOCABULARY = 8192


@click.command()
@click.option("--repeats", default=7, show_default=True, help="Bursts of each kind.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Where to write.")
def main(repeats: int, directory: Path | None) -> None:
    """Print one JSON line: async_stall_over_sync."""
    with tempfile.TemporaryDirectory(prefix="benchmark-checkpoint-", dir=directory) as name:
        measure(Path(name), repeats)


def measure(scratch: Path, repeats: int) -> None:
    """Train in bursts, and report."""
    from benchmarks.parity_ranks import fixed_sequences, make_engine
    from megatron_stare.run import policy
    from megatron_stare.weights import write_tiny_checkpoint

    model = write_tiny_checkpoint(scratch / "model", vocab_size=VOCABULARY, **SHAPE)
    engine = make_engine(str(model), **{"model.dtype": "float32"})
    share = policy.share_out(fixed_sequences(16, VOCABULARY), replicas=1, updates=1, max_tokens=512)[0]
    microbatches = engine.pack(share.updates[0])

    def step() -> None:
        engine.learn(
            microbatches,
            policy.supervised_loss,
            normalizer=share.normalizers[0],
            lr=1e-6,
        )

    bursts = _Bursts(engine, step, scratch / "checkpoints")
    bursts.warm_up()
    kinds: dict[str, Callable[[], float]] = {
        "none": bursts.without,
        "background": bursts.in_background,
        "waited": bursts.waited_for,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(repeats):
        for kind, burst in kinds.items():
            seconds[kind].append(burst())
        note(f"{number + 1}/{repeats}: " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in seconds.items()))
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    stalls = {kind: medians[kind] - medians["none"] for kind in ("background", "waited")}
    report(
        "checkpoint",
        {"async_stall_over_sync": stalls["background"] / stalls["waited"]},
        {
            "megabytes": bursts.nbytes / 1e6,
            "stall_background_seconds": stalls["background"],
            "stall_waited_seconds": stalls["waited"],
            "burst_seconds": medians["none"],
            "steps_a_burst": bursts.steps,
            "call_seconds": statistics.median(bursts.calls),
            "publish_seconds": statistics.median(bursts.publishing),
        },
    )


class _Bursts:
    """Equal numbers of training steps, with and without a save at their beginning."""

    def __init__(self, engine, step: Callable[[], None], directory: Path) -> None:
        self._engine, self._step = engine, step
        self._checkpoints = engine.checkpoints(directory, keep_last=1)
        self._number = 0
        self.steps = 0
        self.nbytes = 0
        self.calls: list[float] = []
        self.publishing: list[float] = []

    def warm_up(self) -> None:
        """Find how many steps a background save lasts; a burst is half as long again."""
        for _ in range(2):
            self._step()
        self._save(background=True)
        while self._checkpoints.poll() is None:
            self._step()
            self.steps += 1
        self.steps += self.steps // 2 + 2
        self.nbytes = sum(p.stat().st_size for p in self._checkpoints.directory.rglob("*") if p.is_file())

    def without(self) -> float:
        """Seconds of a burst."""
        begin = time.perf_counter()
        for _ in range(self.steps):
            self._step()
        return time.perf_counter() - begin

    def in_background(self) -> float:
        """Seconds of a burst with a save that is published on the way."""
        self._clear()
        begin = time.perf_counter()
        self._save(background=True)
        self.calls.append(time.perf_counter() - begin)
        done = False
        for _ in range(self.steps):
            self._step()
            polled = time.perf_counter()
            if not done and self._checkpoints.poll() is not None:
                done = True
                self.publishing.append(time.perf_counter() - polled)
        if not done:  # it took longer than ever: all of the rest is a stall
            self._checkpoints.poll(wait=True)
        return time.perf_counter() - begin

    def waited_for(self) -> float:
        """Seconds of a burst with a save that training waits for."""
        self._clear()
        begin = time.perf_counter()
        self._save(background=False)
        self._checkpoints.poll(wait=True)
        for _ in range(self.steps):
            self._step()
        return time.perf_counter() - begin

    def _save(self, *, background: bool) -> None:
        self._number += 1
        self._engine.save(self._checkpoints, self._number, {"steps": self._number}, background=background)

    def _clear(self) -> None:
        """Deleting the one before is no part of a save."""
        shutil.rmtree(self._checkpoints.directory, ignore_errors=True)
        os.sync()


if __name__ == "__main__":
    main()
