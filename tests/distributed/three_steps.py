"""What a rank of the parity tests does: three optimizer updates on a fixed batch, from fixed weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megatron_stare.config.schema import Config
from megatron_stare.engine.batch import TrainSequence
from megatron_stare.engine.device import current
from megatron_stare.engine.engine import Engine
from megatron_stare.engine.parallel import initialize, leave_model_parallel
from megatron_stare.run import policy
from megatron_stare.run.stare import Stare


def fixed_sequences(count: int, vocabulary: int, seed: int = 0) -> list[TrainSequence]:
    """Responses of mixed lengths and advantages; one is empty, for which nothing may be counted."""
    generator = np.random.default_rng(seed)
    sequences = []
    for i in range(count):
        prompt, response = generator.integers(2, 9), 0 if i == 3 else generator.integers(1, 30)
        ids = generator.integers(0, vocabulary, prompt + response)
        mask = np.arange(prompt + response) >= prompt
        log_probs = np.full(response, -1.0, dtype=np.float32)
        sequences.append(TrainSequence(ids, mask, float(generator.normal()), log_probs))
    return sequences


def make_engine(model: str, **changes) -> Engine:
    """An engine on this rank; `changes` are dotted config keys."""
    values: dict = {
        "model": {"path": model, "dtype": "float32", "vocab_multiple": 8},
        "task": {"source": "unused.jsonl"},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
        "batch": {"max_tokens_per_microbatch": 96},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    config = Config.model_validate(values)
    layout = config.parallel
    parallel = initialize(
        current(),
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        ep=layout.ep,
        sequence_parallel=layout.sequence_parallel,
        timeout_minutes=2,
    )
    engine = Engine(config, current(), parallel)
    engine.config = config
    return engine


def each_layout(model: str, out: str, layouts: dict[str, dict]) -> dict[str, dict]:
    """`three_steps` for every layout in turn on the same ranks; parameters go to OUT/NAME.pt."""
    records = {}
    for name, changes in layouts.items():
        records[name] = three_steps(model, f"{out}/{name}.pt", **changes)
        leave_model_parallel()
    return records


STARE = {
    "stare.rule": "c2",
    "stare.gate": "off",
    "stare.W": 1.5,
    "stare.M": 0.5,
    "stare.top_fraction": 0.2,
}


def three_steps(model: str, out: str, **changes) -> dict:
    """Losses, gradient norms and mean entropy of three updates; rank 0 stores the parameters in `out`."""
    engine = make_engine(model, **STARE | changes)
    config, parallel = engine.config, engine.parallel
    record: dict = {"loss": [], "grad_norm": [], "entropy": [], "figures": []}
    stare = Stare.of(config)
    for i in range(3):
        sequences = fixed_sequences(24, engine.hf.vocab_size, seed=i)
        share = policy.share_out(
            sequences,
            replicas=parallel.dp_size,
            updates=1,
            max_tokens=config.batch.max_tokens_per_microbatch,
            multiple=parallel.microbatch_multiple,
            normalization=config.algorithm.normalization,
            max_response_tokens=config.rollout.max_response_tokens,
        )[parallel.dp_rank]
        microbatches = engine.pack(share.updates[0])
        signals = engine.measure(microbatches)
        targets = policy.Targets.plain(signals.log_probs)
        if stare:
            decision = stare.decide(signals)
            targets.weights, figures = stare.weigh(microbatches, signals, decision, parallel.dp_group)
            record["figures"].append(figures)
        targets.terms = policy.control_terms(config, microbatches, signals, i, parallel.dp_group)
        if engine.reference:
            targets.reference = engine.measure_reference(microbatches)
        loss = policy.rl_loss(config, microbatches, targets)
        stats = engine.learn(microbatches, loss, normalizer=share.normalizers[0], lr=1e-3)
        record["loss"].append(stats.loss)
        record["grad_norm"].append(stats.grad_norm)
        record["entropy"].append(signals.mean_entropy)
    tensors = dict(engine.hf_weights())
    if parallel.rank == 0:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        torch.save(tensors, out)
    return record
