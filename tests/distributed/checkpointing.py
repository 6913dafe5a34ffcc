"""What a rank of the checkpoint tests does."""

from __future__ import annotations

from pathlib import Path

from megatron_stare.engine import checkpoint
from megatron_stare.engine.parallel import leave_model_parallel
from megatron_stare.run import policy
from tests.distributed.three_steps import fixed_sequences, make_engine


def update(engine, seed: int) -> dict[str, float]:
    """One update on a fixed batch."""
    parallel = engine.parallel
    share = policy.share_out(
        fixed_sequences(16, engine.hf.vocab_size, seed),
        replicas=parallel.dp_size,
        updates=1,
        max_tokens=128,
    )[parallel.dp_rank]
    microbatches = engine.pack(share.updates[0])
    signals = engine.measure(microbatches)
    loss = policy.rl_loss(engine.config, microbatches, policy.Targets.plain(signals.log_probs))
    stats = engine.learn(microbatches, loss, normalizer=share.normalizers[0], lr=1e-3)
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, "entropy": signals.mean_entropy}


def save_and_go_on(model: str, directory: str, layouts: dict[str, dict]) -> dict[str, list]:
    """Two updates, a save, and two more, for each layout; what the last two were."""
    records = {}
    for name, changes in layouts.items():
        engine = make_engine(model, **changes)
        for seed in (0, 1):
            update(engine, seed)
        engine.save(Path(directory) / name, 2, {"steps": 2, "note": name}, keep_last=1)
        assert (Path(directory) / name / "step_0000002" / "config.json").is_file()
        records[name] = [update(engine, seed) for seed in (2, 3)]
        leave_model_parallel()
    return records


def load_and_go_on(model: str, directory: str, layouts: dict[str, dict]) -> dict[str, list]:
    """Load what `save_and_go_on` saved as NAME into each layout, and do the last two updates."""
    records = {}
    for key, changes in layouts.items():
        name = key.split(">")[0]
        engine = make_engine(model, **changes)
        found = checkpoint.find_latest(Path(directory) / name)
        assert (found[0], checkpoint.read_run_state(found[1])) == (2, {"steps": 2, "note": name})
        engine.load(found[1])
        records[key] = [update(engine, seed) for seed in (2, 3)]
        leave_model_parallel()
    return records
