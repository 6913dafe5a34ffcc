"""What one rank holds and sends: the engine's own model, optimizer and passes, run on meta tensors.

Layers of a stage are alike, so a pass is run with one layer and with two; what the others add follows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_stare.config.schema import Config
from megatron_stare.engine.batch import Microbatch, TrainSequence, pack_update
from megatron_stare.engine.logprob import log_prob_and_entropy
from megatron_stare.engine.model import build_models, transformer_config
from megatron_stare.engine.optimizer import build_optimizer, wrap_data_parallel
from megatron_stare.engine.parallel import Parallel
from megatron_stare.plan.meta import META, rank_of, to_meta
from megatron_stare.plan.rank import Pass, Rank
from megatron_stare.plan.te_layers import as_on_gpu, balance_experts
from megatron_stare.plan.tracker import SavedTensors, Tracker, storage_bytes
from megatron_stare.weights.hf_config import HFConfig
from megatron_stare.weights.mapping import unwrap


def probe_rank(
    config: Config,
    hf: HFConfig,
    *,
    world_size: int,
    rank: int,
    layers: str,
    lengths: list[int],
    quick: bool = False,
) -> Rank:
    """Build rank `rank` and run one microbatch of sequences with `lengths` tokens through it.

    `layers`: "local" as they are, or "transformer_engine" by stand-ins. All but a sequence's first tokens
    (`task.max_prompt_tokens`, at most half of it) are the response. `quick` leaves `saved` out (0).
    """
    layout = config.parallel
    with warnings.catch_warnings(), rank_of(layout, world_size, rank) as (parallel, device):
        warnings.simplefilter("ignore")
        model_config = transformer_config(
            hf, parallel, device, dtype=getattr(torch, config.model.dtype), recompute=layout.recompute
        )
        model_config.perform_initialization = False
        models = build_models(
            hf, model_config, parallel, device, layers="local", vocab_multiple=config.model.vocab_multiple
        )
        models = wrap_data_parallel(
            models,
            model_config,
            distributed_optimizer=layout.distributed_optimizer,
            overlap=layout.overlap,
        )
        optimizer = build_optimizer(models, model_config, lr=1e-6, distributed=layout.distributed_optimizer)
        optimizer_bytes = _optimizer_bytes(optimizer, models)
        balance_experts(models)
        if layers == "transformer_engine":
            as_on_gpu(models)
        groups = _groups(parallel, hf)
        probe = _Probe(models, _microbatch(lengths, config, parallel), parallel, hf, groups, quick)
        return Rank(
            stage=parallel.pp_rank,
            parameters=sum(p.numel() for model in models for p in model.parameters()),
            weights=storage_bytes(p for model in models for p in model.parameters()),
            gradients=storage_bytes(gradient_buffers(models)),
            optimizer=optimizer_bytes,
            passes=[probe.measure(i) for i in range(len(models))],
            log_prob=probe.log_prob_peak(),
            update_sent=_update_traffic(models, groups),
            spans={name: ranks[-1] - ranks[0] + 1 for name, ranks in groups},
        )


def gradient_buffers(models: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Where Megatron's DistributedDataParallel adds gradients up."""
    return [p.main_grad for model in models for p in model.parameters()]


def optimizer_tensors(optimizer, models: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Adam's moments and the float32 copies of the weights that this rank keeps, without the weights."""
    own = {p.untyped_storage()._cdata for model in models for p in model.parameters()}
    tensors = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        states = [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        masters = [p for group in inner.param_groups for p in group["params"]]
        tensors += [t for t in (*states, *masters) if t.untyped_storage()._cdata not in own]
    return tensors


def _optimizer_bytes(optimizer, models) -> int:
    """Makes Adam's state, which otherwise comes into being in the first step, and adds it up."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                state["exp_avg"] = torch.empty_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.empty_like(parameter, memory_format=torch.preserve_format)
    return storage_bytes(optimizer_tensors(optimizer, models))


def _microbatch(lengths: list[int], config: Config, parallel: Parallel) -> Microbatch:
    """A packed microbatch as the engine lays it out, made with data and then moved to the meta device."""
    sequences = [_sequence(n, min(config.task.max_prompt_tokens, n // 2)) for n in lengths]
    cpu = torch.device("cpu")
    with torch._C.DisableTorchFunction(), torch.device("cpu"):
        packed = pack_update(
            [sequences],
            common_length=None,
            multiple=parallel.length_multiple,
            device=cpu,
            context=parallel.context,
        )[0]
        # A mask's rows are known only from its data; the model takes their numbers as well.
        rows = packed.loss_mask[0].nonzero()[:, 0][None]
        packed = to_meta(packed)
        packed.loss_mask = rows.to(META)
    return packed


def _sequence(length: int, prompt: int) -> TrainSequence:
    return TrainSequence(np.zeros(length, dtype=np.int64), np.arange(length) >= prompt, number=0)


def _groups(parallel: Parallel, hf: HFConfig) -> list[tuple[str, list[int]]]:
    """Name and global ranks of this rank's groups of more than one rank; the first name of a set counts."""
    named = [
        ("TP", parallel.tp_group),
        ("CP", parallel.cp_group),
        ("DP", parallel.dp_cp_group),
        ("PP", parallel.pp_group),
    ]
    if hf.num_experts:
        named.append(("EP", parallel_state.get_expert_model_parallel_group()))
        named.append(("expert DP", parallel_state.get_expert_data_parallel_group()))
    found: dict[tuple[int, ...], str] = {}
    for name, group in named:
        if group.size() > 1:
            found.setdefault(tuple(dist.get_process_group_ranks(group)), name)
    return [(name, list(ranks)) for ranks, name in found.items()]


class _Probe:
    """Passes of one microbatch through a rank's virtual stages."""

    def __init__(self, models, batch: Microbatch, parallel: Parallel, hf: HFConfig, groups, quick: bool):
        self.models, self.batch, self.parallel, self.hf = models, batch, parallel, hf
        self.groups, self.quick = groups, quick

    def measure(self, number: int) -> Pass:
        """The pass through virtual stage `number`, with all its layers."""
        decoder = unwrap(self.models[number]).decoder
        layers = decoder.layers
        measured = []
        for count in (1, 2):
            decoder.layers = torch.nn.ModuleList([layers[i % len(layers)] for i in range(count)])
            decoder.num_layers_per_pipeline_rank = count
            measured.append(self._run(number))
        decoder.layers, decoder.num_layers_per_pipeline_rank = layers, len(layers)
        return _extrapolate(*measured, len(layers))

    def _run(self, number: int) -> Pass:
        model = self.models[number]
        inner = unwrap(model)
        known = self._known(model)
        saved = SavedTensors(known)
        if not self.quick:
            with saved:
                self._forward(model, inner)
        tracker = Tracker(known, self.groups)
        with tracker, model.no_sync():
            output = self._forward(model, inner)
            held, size, forward = tracker.alive, output.nbytes, dict(tracker.sent)
            torch.autograd.backward(output, torch.empty_like(output))
        return Pass(saved.nbytes, held, tracker.peak, size, dict(tracker.sent), forward)

    def log_prob_peak(self) -> int:
        """The most that log_prob_and_entropy makes at once, beside its inputs and their gradients."""
        if not self.parallel.is_last_stage:
            return 0
        inner = unwrap(self.models[-1])
        tied = inner.share_embeddings_and_output_weights
        parameter = inner.shared_embedding_or_output_weight() if tied else inner.output_layer.weight
        rows = self.batch.loss_mask.shape[1]
        hidden = torch.empty((rows, self.hf.hidden_size), dtype=parameter.dtype, requires_grad=True)
        weight = torch.empty_like(parameter, requires_grad=True)
        targets = torch.empty(rows, dtype=torch.int64)
        tracker = Tracker([hidden, weight, targets])
        with tracker:
            out = log_prob_and_entropy(
                hidden, weight, targets, vocab_size=self.hf.vocab_size, group=self.parallel.tp_group
            )
            torch.autograd.backward(out, torch.empty_like(out))
        return max(0, tracker.peak - hidden.nbytes - weight.nbytes)

    def _forward(self, model, inner) -> torch.Tensor:
        batch = self.batch
        if not inner.pre_process:
            rows = batch.tokens.shape[1] // (self.parallel.tp_size if self.parallel.sequence_parallel else 1)
            dtype = inner.config.params_dtype
            inner.set_input_tensor(
                torch.empty((rows, 1, self.hf.hidden_size), dtype=dtype, requires_grad=True)
            )
        return model(
            batch.tokens,
            batch.positions,
            None,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            packed_seq_params=batch.packed,
        )

    def _known(self, model) -> list[torch.Tensor]:
        parameters = list(model.parameters())
        batch = self.batch
        inputs = [batch.tokens, batch.positions, batch.labels, batch.loss_mask]
        return [*parameters, *(p.main_grad for p in parameters), *inputs]


def _extrapolate(one: Pass, two: Pass, layers: int) -> Pass:
    """From one layer and two to `layers`: each further one adds what the second did."""

    def line(first: float, second: float) -> float:
        return first + (layers - 1) * (second - first)

    numbers = {name: line(getattr(one, name), getattr(two, name)) for name in ("saved", "held", "peak")}
    both, forward = (
        {name: line(getattr(one, key).get(name, 0.0), sent) for name, sent in getattr(two, key).items()}
        for key in ("sent", "sent_forward")
    )
    return Pass(**numbers, output=one.output, sent=both, sent_forward=forward)


def _update_traffic(models, groups) -> dict[str, float]:
    """Bytes sent once an update: to reduce gradients, and to gather the updated parameters."""
    gradients, parameters = Tracker(groups=groups), Tracker(groups=groups)
    with gradients:
        for model in models:
            model.start_grad_sync()
            model.finish_grad_sync()
    with parameters:
        for model in models:
            if model.ddp_config.use_distributed_optimizer:
                model.start_param_sync(force_sync=True)
    return {
        "DP gradients": sum(gradients.sent.values()),
        "DP parameters": sum(parameters.sent.values()),
    }
