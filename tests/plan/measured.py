"""What a rank of a real run on gloo allocates: the engine itself, after one optimizer update."""

from __future__ import annotations

import numpy as np
import torch

from megatron_stare.config.schema import Config
from megatron_stare.engine.batch import TrainSequence
from megatron_stare.engine.device import current
from megatron_stare.engine.engine import Engine
from megatron_stare.engine.parallel import initialize, leave_model_parallel
from megatron_stare.plan.probe import gradient_buffers, optimizer_tensors
from megatron_stare.plan.tracker import SavedTensors, Tracker, storage_bytes
from megatron_stare.weights.mapping import unwrap


def each_layout(configs: dict[str, dict], lengths: list[int], prompt: int) -> dict[str, dict]:
    """`allocated` for every configuration in turn on the same ranks."""
    found = {}
    for name, values in configs.items():
        found[name] = allocated(Config.model_validate(values), lengths, prompt)
        leave_model_parallel()
    return found


def allocated(config: Config, lengths: list[int], prompt: int) -> dict:
    """Bytes of this rank, by the storages of its tensors."""
    layout = config.parallel
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "cp", "ep", "sequence_parallel")}
    engine = Engine(config, current(), initialize(current(), **sizes, timeout_minutes=2))
    batch = engine.pack([[_sequence(n, prompt) for n in lengths]])[0]

    def loss(i, log_probs, entropy):
        return -log_probs.sum(), {}

    engine.learn([batch] * engine.parallel.pp_size, loss, normalizer=1.0, lr=1e-3)
    models = engine.models
    known = [t for m in models for p in m.parameters() for t in (p, p.main_grad)]
    known += [batch.tokens, batch.positions, batch.labels, batch.loss_mask]
    with SavedTensors(known) as saved:
        _forward(engine, batch)
    nbytes = saved.nbytes
    saved.release()
    tracker = Tracker(known)
    with tracker, models[0].no_sync():
        output = _forward(engine, batch)
        output.backward(torch.ones_like(output))
    return {
        "stage": engine.parallel.pp_rank,
        "weights": storage_bytes(p for m in models for p in m.parameters()),
        "gradients": storage_bytes(gradient_buffers(models)),
        "optimizer": storage_bytes(optimizer_tensors(engine.optimizer, models)),
        "saved": nbytes,
        "peak": tracker.peak,
    }


def _sequence(length: int, prompt: int) -> TrainSequence:
    ids = np.arange(length) % 50
    return TrainSequence(ids, np.arange(length) >= prompt, 1.0, np.zeros(length - prompt, dtype=np.float32))


def _forward(engine, batch) -> torch.Tensor:
    """One microbatch through this stage; what another stage would send is made up."""
    model = engine.models[0]
    inner, parallel = unwrap(model), engine.parallel
    if not inner.pre_process:
        rows = batch.length // (parallel.tp_size if parallel.sequence_parallel else 1)
        shape = (rows, 1, engine.hf.hidden_size)
        inner.set_input_tensor(torch.randn(shape, dtype=inner.config.params_dtype, requires_grad=True))
    return model(
        batch.tokens,
        batch.positions,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed,
    )
