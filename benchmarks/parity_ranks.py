"""What a rank of the parity benchmark does: optimizer updates on fixed batches from fixed weights.

`python -m benchmarks.parity_ranks JOBS.json` under a process group's environment does a list of jobs in turn;
rank 0 writes a line when one is done.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_stare.config.schema import Config
from megatron_stare.engine.batch import Microbatch, TrainSequence
from megatron_stare.engine.device import current
from megatron_stare.engine.engine import Engine
from megatron_stare.engine.parallel import initialize, leave_model_parallel
from megatron_stare.engine.step import Signals
from megatron_stare.run import policy
from megatron_stare.run.stare import Stare
from megatron_stare.run.worker import leave
from megatron_stare.stare import surprisal_thresholds
from megatron_stare.weights.load import load_hf_weights

UPDATES = 3
# Every token that is reweighted changes the loss, and the gate never closes.
STARE = {
    "stare.rule": "c2",
    "stare.gate": "off",
    "stare.W": 1.5,
    "stare.M": 0.5,
    "stare.top_fraction": 0.2,
}
# Adam with an epsilon far above any gradient moves parameters by lr / epsilon * gradient; so far that what
# rounding hides of the difference is far below the gradient.
_EPSILON, _STEP = 1e6, 1e3


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
    parallel = initialize(current(), **config.parallel.groups, timeout_minutes=5)
    engine = Engine(config, current(), parallel)
    engine.config = config
    return engine


def each_job(jobs: list[dict], out: str) -> dict[str, dict]:
    """`updates` for every job (name, model, changes, apart) in turn on the same ranks.

    Parameters and gradients go to OUT/NAME.pt. Returns what each gave, by name.
    """
    records = {}
    for job in jobs:
        records[job["name"]] = updates(
            job["model"], f"{out}/{job['name']}.pt", apart=job.get("apart", False), **job["changes"]
        )
        leave_model_parallel()
    return records


def updates(model: str, out: str, *, apart: bool = False, **changes) -> dict[str, list]:
    """Loss, gradient norm, entropy, thresholds, selected tokens and STARE's figures of some updates.

    The first one shows the gradients and is taken back. Rank 0 stores them and the parameters after the
    last update in `out`, under Hugging Face's names. `apart`: one sequence a microbatch, instead of packed
    ones.
    """
    engine = make_engine(model, **STARE | changes)
    config, parallel = engine.config, engine.parallel
    record: dict[str, list] = {
        name: [] for name in ("loss", "grad_norm", "entropy", "thresholds", "selected", "figures")
    }
    stare = Stare.of(config)
    start = _copied(engine.hf_weights())
    for number in range(UPDATES):
        share = _share(engine, fixed_sequences(24, engine.hf.vocab_size, seed=number), apart)
        microbatches = engine.pack(share.updates[0])
        signals = engine.measure(microbatches)
        targets = policy.Targets.plain(signals.log_probs)
        if stare:
            decision = stare.decide(signals)
            group = parallel.dp_cp_group
            targets.weights, figures = stare.weigh(microbatches, signals, decision, group)
            record["figures"].append(figures)
            record["thresholds"].append(_thresholds(engine, stare, microbatches, signals))
            record["selected"].append(_selected(engine, microbatches, targets.weights))
        targets.terms = policy.control_terms(config, microbatches, signals, number, parallel.dp_cp_group)
        if engine.reference:
            targets.reference = engine.measure_reference(microbatches)
        loss = policy.rl_loss(config, microbatches, targets)
        update = _gradient_update if number == 0 else _adam_update
        stats = update(engine, microbatches, loss, share.normalizers[0])
        record["loss"].append(stats.loss)
        record["grad_norm"].append(stats.grad_norm)
        record["entropy"].append(signals.mean_entropy)
        if number == 0:
            moved = _copied(engine.hf_weights())
            _load_again(engine, model)
    end = _copied(engine.hf_weights())
    if parallel.rank == 0:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        gradients = {name: (start[name].double() - x.double()) / _STEP for name, x in moved.items()}
        torch.save({"gradients": gradients, "parameters": end}, out)
    return record


def _copied(weights) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights if tensor is not None}


def _share(engine: Engine, sequences: list[TrainSequence], apart: bool) -> policy.Share:
    config, parallel = engine.config, engine.parallel
    shares = policy.share_out(
        sequences,
        replicas=parallel.dp_size,
        updates=1,
        max_tokens=config.batch.max_tokens_per_microbatch,
        multiple=parallel.microbatch_multiple,
        length_of=parallel.context.padded,
        normalization=config.algorithm.normalization,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    if apart:
        for share in shares:
            share.updates = [[[s] for mb in update for s in mb] for update in share.updates]
        count = max(len(share.updates[0]) for share in shares)
        count = -(-count // parallel.microbatch_multiple) * parallel.microbatch_multiple
        for share in shares:
            share.updates[0] += [[] for _ in range(count - len(share.updates[0]))]
    return shares[parallel.dp_rank]


def _adam_update(engine: Engine, microbatches, loss, normalizer: float):
    return engine.learn(microbatches, loss, normalizer=normalizer, lr=1e-3)


def _gradient_update(engine: Engine, microbatches, loss, normalizer: float):
    """An update by the clipped gradient itself, whoever holds which part of it: what moved shows it."""
    before = [(group["eps"], group["weight_decay"]) for group in engine.optimizer.param_groups]
    for group in engine.optimizer.param_groups:
        group["eps"], group["weight_decay"] = _EPSILON, 0.0
    stats = engine.learn(microbatches, loss, normalizer=normalizer, lr=_STEP * _EPSILON)
    for group, (eps, decay) in zip(engine.optimizer.param_groups, before, strict=True):
        group["eps"], group["weight_decay"] = eps, decay
    return stats


def _load_again(engine: Engine, model: str) -> None:
    parallel = engine.parallel
    load_hf_weights(engine.models, model, engine.hf, tp_rank=parallel.tp_rank, tp_size=parallel.tp_size)
    engine.optimizer.reload_model_params()


def _thresholds(
    engine: Engine, stare: Stare, microbatches: list[Microbatch], signals: Signals
) -> list[float]:
    advantages = torch.cat([mb.advantages for mb in microbatches])
    found = surprisal_thresholds(
        -torch.cat(signals.log_probs),
        advantages,
        torch.ones_like(advantages, dtype=torch.bool),
        stare.gate.config.rule,
        engine.parallel.dp_cp_group,
    )
    return found.value.tolist()


def _selected(engine: Engine, microbatches: list[Microbatch], weights) -> list[int]:
    """Numbers of the tokens of the whole batch whose weight is not 1."""
    pairs = zip(microbatches, weights, strict=True)
    here = [mb.token_numbers[weight != 1].tolist() for mb, weight in pairs if weight is not None]
    group = engine.parallel.dp_cp_group
    everywhere = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, list(itertools.chain(*here)), group=group)
    numbers = list(itertools.chain(*everywhere))
    assert len(numbers) == len(set(numbers)), "a token is on two ranks"
    return sorted(numbers)


def main() -> None:
    """One rank: do the jobs, tell of each by its number, and write what all gave."""
    arguments = json.loads(Path(sys.argv[1]).read_text())
    out = arguments["out"]
    for job in arguments["jobs"]:
        record = each_job([job], out)[job["name"]]
        digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
        digests = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest)
        assert len(set(digests)) == 1, f"{job['name']}: ranks disagree"
        if dist.get_rank() == 0:
            Path(f"{out}/{job['name']}.json").write_text(json.dumps(record))
            print(job["name"], flush=True)
    leave(0)


if __name__ == "__main__":
    main()
