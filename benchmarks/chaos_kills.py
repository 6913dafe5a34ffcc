"""What `benchmarks.chaos` does to a run: the run itself, its processes, its disk, its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import note

MARK = "MEGATRON_STARE_CHAOS"
_CHECKPOINT_DISK_MB = 64


def reward(text: str, answer: object) -> float:
    """A number in [0, 1) that is each text's own, so that there is something to learn in every step."""
    digest = hashlib.blake2b(f"{text}/{answer}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32


class Run:
    """`megatron-stare train` on one run directory, started as often as it is killed."""

    def __init__(self, config: Path, root: Path) -> None:
        self.config, self.root = config, root
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen | None = None
        self.starts = 0
        self.rows: dict[int, dict[str, Any]] = {}
        self.repeated_differently = 0
        self._read = 0

    def start(self) -> None:
        """Start it, or go on with it."""
        self.starts += 1
        arguments = ["train", str(self.config), f"run.dir={self.root}", "resume.mode=auto"]
        with self.root.with_suffix(".log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_stare", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, MARK: self.mark},
                start_new_session=True,
            )

    @property
    def steps(self) -> int:
        """Finished steps, as rank 0 wrote them last."""
        return int(self._json("progress.json").get("steps", 0))

    @property
    def starting_from(self) -> int:
        """The step from which the present ranks went on."""
        return int(self._json("progress.json").get("start", 0))

    def children(self) -> dict[str, int]:
        """Process ids by name: trainer, server-0, ..., router."""
        return self._json("nodes/0.json").get("children", {})

    def ranks(self) -> list[psutil.Process]:
        """The trainer ranks that live now."""
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            return psutil.Process(self.children()["trainer"]).children()
        return []

    def observe(self) -> None:
        """Read what metrics.jsonl says now; a step seen before must say the same again."""
        with contextlib.suppress(OSError):
            for line in (self.root / "metrics.jsonl").read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    row = comparable(json.loads(line))
                    before = self.rows.setdefault(row["step"], row)
                    if before != row:
                        self.repeated_differently += 1
                        note(f"step {row['step']} was learned on other data: {_difference(before, row)}")
                        self.rows[row["step"]] = row

    def left_over(self) -> list[psutil.Process]:
        """Processes of this run that live, the supervisor's own and all below it included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.root / name).read_text())
        except (OSError, ValueError):
            return {}


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """What a step learned: all of its figures but times and the sampler's own rounding."""
    skipped = ("time/", "timestamp", "sampler_gap/", "reward/seconds")
    return {name: value for name, value in row.items() if not name.startswith(skipped)}


def tensors(directory: Path) -> dict[str, Any]:
    """Every whole tensor of a checkpoint by its key."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    return state


def _difference(before: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {name: (before.get(name), row.get(name)) for name in row if before.get(name) != row.get(name)}


class Chaos:
    """Draws disturbances from a seed and carries them out. Each returns what it hit, for the log."""

    def __init__(self, run: Run, seed: int) -> None:
        self._run = run
        self._random = random.Random(seed)
        self.counts: dict[str, int] = {}

    def draw(self) -> str:
        """The next kind, by how often such things happen."""
        kinds = {"server": 16, "rank": 12, "router": 5, "torchrun": 2, "job": 10, "disk": 5}
        kind = self._random.choices(list(kinds), list(kinds.values()))[0]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return kind

    def wait(self, seconds: float) -> float:
        """A random moment within so many seconds."""
        return self._random.uniform(0.0, seconds)

    def kill(self, kind: str) -> str:
        """Send SIGKILL to a random process of this kind; the whole job's is the supervisor's."""
        if kind == "job":
            self._run.process.send_signal(signal.SIGKILL)
            self._run.process.wait()
            return f"supervisor {self._run.process.pid}"
        if kind == "rank":
            victims = self._run.ranks()
        else:
            name = {"router": "router", "torchrun": "trainer"}.get(kind)
            servers = [pid for key, pid in self._run.children().items() if key.startswith("server")]
            pids = servers if name is None else [pid for pid in [self._run.children().get(name)] if pid]
            victims = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        if not victims:
            return "nobody: it was down already"
        victim = self._random.choice(victims)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
        return f"{kind} {victim.pid}"

    def damage(self) -> str:
        """Cut or flip a file while nothing runs: half of the times one of the newest checkpoint."""
        checkpoints = sorted((self._run.root / "checkpoints").glob("step_???????"))
        journal = sorted((self._run.root / "journal").glob("*.safetensors"))
        choices: list[Path] = [self._run.root / "metrics.jsonl", self._run.root / "progress.json"]
        choices += journal[-1:]
        if len(checkpoints) > 1 and self._random.random() < 0.5:
            choices = sorted(path for path in checkpoints[-1].iterdir() if path.is_file())
        path = self._random.choice([path for path in choices if path.exists()])
        data = bytearray(path.read_bytes())
        if path.name == "metrics.jsonl":
            path.write_bytes(data[: -self._random.randrange(1, 40)])  # as a crash leaves the last line
        elif self._random.random() < 0.5 or not data:
            path.write_bytes(data[: len(data) // 2])
        else:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            path.write_bytes(data)
        return str(path.relative_to(self._run.root))


@contextlib.contextmanager
def checkpoint_disk(directory: Path) -> Iterator[Callable[[], contextlib.AbstractContextManager] | None]:
    """A small file system for checkpoints, and how to fill it; None where mounting is not allowed."""
    directory.mkdir(parents=True, exist_ok=True)
    size = f"size={_CHECKPOINT_DISK_MB}m"
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory)]
    mounted = False
    if shutil.which("mount"):
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        filler = directory / "filler"
        try:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(b"\0" * 65536):
                    pass
            yield
        finally:
            filler.unlink(missing_ok=True)

    try:
        yield full if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(directory)], check=False)


def until(condition: Callable[[], bool], seconds: float, tick: Callable[[], None] = lambda: None) -> bool:
    """Poll until `condition()`; False when the time is over first."""
    deadline = time.monotonic() + seconds
    while not condition():
        tick()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
