"""Tiny checkpoints to quantise, and their exports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def write_source(directory: Path, architecture: str, **fields: object) -> Path:
    """A random checkpoint with the tokenizer of the sums task; sizes are multiples of 128."""
    from megatron_stare.tasks.sums import VOCABULARY, write_tokenizer
    from megatron_stare.weights import write_tiny_checkpoint

    sizes = {
        "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 384, "vocab_size": len(VOCABULARY),
        "dtype": "bfloat16",
    }  # fmt: skip
    if architecture == "qwen3_moe":
        sizes["moe_intermediate_size"] = 128
    if architecture == "mistral":
        sizes["sliding_window"] = None
    write_tiny_checkpoint(directory, architecture=architecture, **sizes | fields)
    write_tokenizer(directory)
    return directory


def write_prompts(path: Path, rows: int = 12) -> Path:
    lines = [json.dumps({"prompt": f"{10 + 7 * i}=", "answer": i}) for i in range(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def quant_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quant")


@pytest.fixture(scope="session")
def prompts(quant_dir: Path) -> Path:
    """A JSONL file with 12 prompts."""
    return write_prompts(quant_dir / "prompts.jsonl")


@pytest.fixture(scope="session")
def source_of(quant_dir: Path) -> Callable[[str], Path]:
    """The unquantised checkpoint of a family. Not to be written to."""

    def find(architecture: str) -> Path:
        path = quant_dir / architecture
        return path if path.is_dir() else write_source(path, architecture)

    return find


@pytest.fixture(scope="session")
def export_of(quant_dir: Path, prompts: Path, source_of: Callable[[str], Path]) -> Callable[[str, str], Path]:
    """A verified export (family, quantisation). Not to be written to."""
    from megatron_stare.quant import export_fp8

    def find(architecture: str, quant: str) -> Path:
        path = quant_dir / f"{architecture}-{quant}"
        if not path.is_dir():
            export_fp8(source_of(architecture), path, quant, calibration=str(prompts))
        return path

    return find


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a checkpoint that the test may damage."""
    return lambda path: Path(shutil.copytree(path, tmp_path / f"copy-{path.name}"))


@pytest.fixture
def make_source(tmp_path: Path) -> Callable[..., Path]:
    """make_source(family, **sizes): a checkpoint of its own."""
    return lambda architecture, **fields: write_source(tmp_path / "source", architecture, **fields)
