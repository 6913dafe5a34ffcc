"""Both conversions of a checkpoint on disk against plainly copying its files.

    python -m benchmarks.convert [--gb 4] [--repeats 3] [--workers N]

Makes a Qwen3 checkpoint of random bfloat16 numbers, then copies it, converts it to Megatron's format and
converts that back, in turn. Every contestant ends with its files on the disk (fsync). Conversions run in
processes of their own, start included, as from a shell.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.common import note, report
from megatron_stare.weights.files import staged_directory
from megatron_stare.weights.hf_config import HFConfig, parse_hf_config
from megatron_stare.weights.mapping import model_entries
from megatron_stare.weights.save import plan_files, write_index
from megatron_stare.weights.stream import SafetensorsStream, TensorSpec

_WIDTH = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_SHARD_BYTES = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model in GB (10^9 bytes)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--dir", type=Path, default=None, help="where to work; default: the temporary folder")
    arguments = parser.parse_args()
    needed = int(3.5e9 * arguments.gb)
    free = shutil.disk_usage(arguments.dir or tempfile.gettempdir()).free
    if free < needed:
        parser.error(f"{needed / 1e9:.0f} GB of disk are needed, {free / 1e9:.0f} GB are free")
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="convert-") as folder:
        measure(Path(folder), arguments.gb, arguments.repeats, arguments.workers)


def measure(folder: Path, gb: float, repeats: int, workers: int | None) -> None:
    """Run all contestants in turn, and print the result."""
    source, megatron, target = (folder / name for name in ("hf", "megatron", "target"))
    note(f"making a checkpoint of {gb:g} GB")
    size = write_checkpoint(source, gb)
    seconds: dict[str, list[float]] = {"copy": [], "to_megatron": [], "to_hf": []}
    peaks = {"to_megatron": 0, "to_hf": 0}
    for number in range(repeats):
        _prepare(source)
        begin = perf_counter()
        copy(source, target)
        seconds["copy"].append(perf_counter() - begin)
        shutil.rmtree(target)
        for name, before, after in (("to_megatron", source, megatron), ("to_hf", megatron, target)):
            _prepare(before, unneeded=source if before is megatron else None)
            took, peak = convert(before, after, workers)
            seconds[name].append(took)
            peaks[name] = max(peaks[name], peak)
        for file in source.glob("*.safetensors"):
            if not filecmp.cmp(file, target / file.name, shallow=False):
                sys.exit(f"the round trip changed {file.name}")
        shutil.rmtree(megatron)
        shutil.rmtree(target)
        note(f"{number + 1} of {repeats}: " + ", ".join(f"{k} {v[-1]:.1f} s" for k, v in seconds.items()))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    speed = {name: size / 1e9 / took for name, took in median.items()}
    report(
        "convert",
        {
            "peak_over_model": max(peaks.values()) / size,
            "speed_over_copy": min(speed["to_megatron"], speed["to_hf"]) / speed["copy"],
        },
        {
            "model_gb": size / 1e9,
            "repeats": repeats,
            **{f"{name}_gb_per_s": value for name, value in speed.items()},
            **{f"{name}_speed_over_copy": speed[name] / speed["copy"] for name in peaks},
            **{f"{name}_peak_gb": peak / 1e9 for name, peak in peaks.items()},
            **{f"{name}_peak_over_model": peak / size for name, peak in peaks.items()},
        },
    )


def write_checkpoint(directory: Path, gb: float) -> int:
    """Write a sharded checkpoint of about `gb` GB, tensor by tensor; bytes of its tensors."""
    config = _config_of_size(gb * 1e9)
    entries = model_entries(config)
    specs = {
        entry.names: [
            TensorSpec(name, shape, torch.bfloat16)
            for name, shape in zip(entry.hf, entry.layout.hf_shapes, strict=True)
        ]
        for entry in entries
    }
    files = plan_files([(entry, specs[entry.names], [0]) for entry in entries], _SHARD_BYTES)
    generator = torch.Generator().manual_seed(0)
    with staged_directory(directory) as stage:
        for file in files:
            with SafetensorsStream(stage / file.name, file.specs) as stream:
                for name, tensor in _random(file.specs, generator):
                    stream.add(name, tensor)
        write_index(stage, [(file.name, file.specs) for file in files])
        (stage / "config.json").write_text(json.dumps(config.raw))
    return sum(spec.nbytes for some in specs.values() for spec in some)


def copy(source: Path, target: Path) -> None:
    """The plain copy."""
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        descriptor = os.open(target / file.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def convert(source: Path, target: Path, workers: int | None) -> tuple[float, int]:
    """Seconds that the command took, and the bytes that its largest process held at most."""
    command = [sys.executable, "-m", "benchmarks.convert", "--one", source, target, str(workers or 0)]
    begin = perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return perf_counter() - begin, int(done.stdout.split()[-1])


def _prepare(source: Path, unneeded: Path | None = None) -> None:
    """Alike for all: the source, and no other large files, in the page cache; nothing waits to be written."""
    os.sync()
    for file in unneeded.iterdir() if unneeded else ():
        with open(file, "rb") as held:
            os.posix_fadvise(held.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for file in source.iterdir():
        with open(file, "rb", buffering=0) as held:
            while held.read(1 << 24):
                pass


def _one(source: str, target: str, workers: int) -> None:
    """A conversion in this process and its workers; prints the largest one's peak in bytes."""
    from megatron_stare.weights.convert import plan_conversion

    plan_conversion(source, target, workers=workers or None, max_shard_bytes=_SHARD_BYTES).run()
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(max(peaks) * 1024)


def _config_of_size(size: float) -> HFConfig:
    layers = 1
    while _bytes(config := parse_hf_config({**_WIDTH, "num_hidden_layers": layers})) < size:
        layers += 1
    return config


def _bytes(config: HFConfig) -> int:
    shapes = [shape for entry in model_entries(config) for shape in entry.layout.hf_shapes]
    return sum(2 * torch.Size(shape).numel() for shape in shapes)


def _random(specs: list[TensorSpec], generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in specs:
        yield spec.name, torch.empty(spec.shape, dtype=spec.dtype).normal_(0, 0.02, generator=generator)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(*sys.argv[2:4], int(sys.argv[4]))
    else:
        main()
