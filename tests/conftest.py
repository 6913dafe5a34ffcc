"""Fixtures that several packages share: a tiny model, and one SGLang fleet for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest


def write_tiny_model(directory: Path, seed: int) -> Path:
    """A random Qwen3 checkpoint as Hugging Face writes it: 2 layers, hidden 64, vocabulary 16, float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megatron_stare.tasks.sums import BOS, EOS, PAD, VOCABULARY, write_tokenizer

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_theta=10000.0,
        # Wide enough that tokens differ clearly in probability, and weights of two seeds in log-probs.
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
        pad_token_id=VOCABULARY.index(PAD),
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model that `sglang_fleet` serves. Not to be written to."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[[Path, int], Path]:
    """write_tiny_model(directory, seed), for tests that need other weights of the same shape."""
    return write_tiny_model


@pytest.fixture(scope="session")
def sglang_fleet(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """One SGLang server and a router on free ports, serving `tiny_model_dir` in float32.

    Has `.endpoints`, `.rollout` (its RolloutSection), `.fleet`, `.run_dir`. A test that changes the served
    weights need not change them back: every test publishes what it expects, or asks only what holds for any.
    """
    from megatron_stare.config.schema import RolloutSection
    from megatron_stare.rollout.server import ServerFleet

    rollout = RolloutSection(
        max_response_tokens=16, context_length=128, start_timeout=240.0, request_timeout=60.0, bucket_mb=1
    )
    run_dir = tmp_path_factory.mktemp("fleet")
    fleet = ServerFleet(rollout, str(tiny_model_dir), "float32", run_dir, seed=0)
    try:
        fleet.start()
        yield SimpleNamespace(fleet=fleet, endpoints=fleet.endpoints, rollout=rollout, run_dir=run_dir)
    finally:
        members = [p for pid in fleet.pids.values() for p in psutil.Process(pid).children(recursive=True)]
        fleet.stop()
        _, left = psutil.wait_procs(members, timeout=0.5)
        assert not left, f"left running: {left}"
