"""What a rank of the checkpoint tests does."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.parity_ranks import fixed_sequences, make_engine
from megatron_stare.engine import checkpoint
from megatron_stare.engine.parallel import leave_model_parallel
from megatron_stare.engine.saving import newest_good
from megatron_stare.run import policy


def update(engine, seed: int) -> dict[str, float]:
    """One update on a fixed batch."""
    parallel = engine.parallel
    share = policy.share_out(
        fixed_sequences(16, engine.hf.vocab_size, seed),
        replicas=parallel.dp_size,
        updates=1,
        max_tokens=128,
        length_of=parallel.context.padded,
    )[parallel.dp_rank]
    microbatches = engine.pack(share.updates[0])
    signals = engine.measure(microbatches)
    loss = policy.rl_loss(engine.config, microbatches, policy.Targets.plain(signals.log_probs))
    stats = engine.learn(microbatches, loss, normalizer=share.normalizers[0], lr=1e-3)
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, "entropy": signals.mean_entropy}


def save(engine, directory: str | Path, steps: int, state: dict) -> Path:
    """A published checkpoint; its path."""
    kept = engine.checkpoints(Path(directory), keep_last=1)
    engine.save(kept, steps, state, background=False)
    assert kept.poll(wait=True).problem is None
    return Path(directory) / f"step_{steps:07d}"


def log_probs(engine) -> list[float]:
    """Of fixed sequences, the same on every replica."""
    sequences = fixed_sequences(6, engine.hf.vocab_size)
    share = policy.share_out(sequences, replicas=1, updates=1, max_tokens=512, multiple=2)[0]
    return torch.cat(engine.measure(engine.pack(share.updates[0])).log_probs).tolist()


def reshard(model: str, other: str, directory: str, saved: dict, loaded: dict[str, dict]) -> dict[str, list]:
    """Log-probs of `model` in the layout it is saved in, and in each layout that loads it over `other`."""
    engine = make_engine(model, **saved)
    path = save(engine, directory, 1, {"steps": 1})
    found = {"saved": log_probs(engine)}
    leave_model_parallel()
    for name, changes in loaded.items():
        engine = make_engine(other, **changes)
        before = log_probs(engine)
        checkpoint.load_weights(path, engine.models)
        found[name] = log_probs(engine)
        assert found[name] != before
        leave_model_parallel()
    return found


def save_and_go_on(model: str, directory: str, layouts: dict[str, dict]) -> dict[str, list]:
    """Two updates, a save, and two more while it is written, for each layout; what the last two were."""
    records = {}
    for name, changes in layouts.items():
        engine = make_engine(model, **changes)
        for seed in (0, 1):
            update(engine, seed)
        kept = engine.checkpoints(Path(directory) / name, keep_last=1)
        engine.save(kept, 2, {"steps": 2, "note": name}, background=True)
        records[name] = [update(engine, seed) for seed in (2, 3)]
        assert kept.poll(wait=True).problem is None
        assert (Path(directory) / name / "step_0000002" / "config.json").is_file()
        leave_model_parallel()
    return records


def load_and_go_on(model: str, directory: str, layouts: dict[str, dict]) -> dict[str, list]:
    """Load what `save_and_go_on` saved as NAME into each layout, and do the last two updates."""
    records = {}
    for key, changes in layouts.items():
        name = key.split(">")[0]
        engine = make_engine(model, **changes)
        found, problems = newest_good(Path(directory) / name, engine.parallel, print)
        assert (found.step, found.run_state, problems) == (2, {"steps": 2, "note": name}, [])
        engine.load(found.path)
        records[key] = [update(engine, seed) for seed in (2, 3)]
        leave_model_parallel()
    return records
