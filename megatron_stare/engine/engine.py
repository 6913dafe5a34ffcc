"""The policy on this rank: model, optimizer, and the collective operations that a step needs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_stare.config.schema import Config
from megatron_stare.engine import checkpoint, step
from megatron_stare.engine.batch import Microbatch, TrainSequence, pack_update, packed_length
from megatron_stare.engine.device import Device
from megatron_stare.engine.model import build_models, transformer_config
from megatron_stare.engine.optimizer import LearningRate, build_optimizer, wrap_data_parallel
from megatron_stare.engine.packing import attention_length
from megatron_stare.engine.parallel import Parallel
from megatron_stare.engine.precision import precision_fields, sequence_multiple
from megatron_stare.engine.saving import Checkpoints
from megatron_stare.weights.export import Exporter
from megatron_stare.weights.hf_config import read_hf_config
from megatron_stare.weights.load import load_hf_weights


class Engine:
    """All methods are collective: every rank of the run calls them in the same order."""

    def __init__(self, config: Config, device: Device, parallel: Parallel):
        self.device, self.parallel = device, parallel
        self._hf_dir = config.model.path
        self.hf = read_hf_config(config.model.path)
        layers = device.layers if config.model.layers == "auto" else config.model.layers
        optimizer, layout, model = config.optimizer, config.parallel, config.model
        self._fp8_multiple = sequence_multiple(model.fp8)
        self.model_config = transformer_config(
            self.hf,
            parallel,
            device,
            dtype=getattr(torch, config.model.dtype),
            recompute=layout.recompute,
            expert_balance=layout.expert_balance,
            precision=precision_fields(
                model.fp8,
                keep_ends=model.fp8_keep_ends,
                fp8_parameters=model.fp8_parameters,
                experts=self.hf.num_experts > 0,
            ),
        )
        rl = config.objective == "rl"

        def load_models() -> list[torch.nn.Module]:
            models = build_models(
                self.hf,
                self.model_config,
                parallel,
                device,
                layers=layers,
                vocab_multiple=config.model.vocab_multiple,
                temperature=config.rollout.temperature if rl else 1.0,
            )
            load_hf_weights(
                models, config.model.path, self.hf, tp_rank=parallel.tp_rank, tp_size=parallel.tp_size
            )
            return models

        # Never trained: what the KL penalty holds the policy close to.
        self.reference = load_models() if rl and config.algorithm.kl_coef > 0 else []
        self.models = wrap_data_parallel(
            load_models(),
            self.model_config,
            distributed_optimizer=layout.distributed_optimizer,
            overlap=layout.overlap,
        )
        self.optimizer = build_optimizer(
            self.models,
            self.model_config,
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            clip_grad=optimizer.clip_grad,
            distributed=layout.distributed_optimizer,
            offload=layout.optimizer_offload,
        )
        self._settle: Callable[[], None] = lambda: None
        self._largest_norm = optimizer.skip_grad_norm or math.inf
        self.learning_rate = LearningRate(
            peak=optimizer.lr,
            floor=optimizer.min_lr,
            schedule=optimizer.schedule,
            warmup=optimizer.warmup_steps,
            total=config.run.steps * config.batch.updates_per_step,
        )

    @property
    def attention_length(self) -> float:
        """Tokens at which a sequence's attention costs as much as its linear layers."""
        hf = self.hf
        return attention_length(
            hidden_size=hf.hidden_size,
            ffn_size=hf.expert_ffn_size if hf.num_experts else hf.ffn_size,
            num_heads=hf.num_heads,
            num_kv_heads=hf.num_kv_heads,
            head_dim=hf.head_dim,
            experts_per_token=hf.experts_per_token or 1,
        )

    def pack(self, microbatches: list[list[TrainSequence]]) -> list[Microbatch]:
        """Lay this rank's part of its replica's share of an update out on the device."""
        parallel = self.parallel
        longest = max(packed_length(chosen, parallel.context) for chosen in microbatches)
        # Megatron's all-gather of tokens to experts takes equally many from every rank.
        among_experts = parallel.ep_size > 1 and self.model_config.moe_token_dispatcher_type == "allgather"
        if among_experts:
            longest = parallel.largest(longest)
        return pack_update(
            microbatches,
            common_length=longest if parallel.pp_size > 1 or among_experts else None,
            multiple=math.lcm(parallel.length_multiple, parallel.cp_size * self._fp8_multiple),
            device=self.device.torch,
            context=parallel.context,
        )

    def measure(self, microbatches: list[Microbatch]) -> step.Signals:
        """Log-probs and entropy of the batch under the current policy, without gradient."""
        return step.measure(self.models, microbatches, self.parallel)

    def measure_reference(self, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        """Log-probs of the batch under the model of the run's start, by microbatch."""
        return step.measure(self.reference, microbatches, self.parallel).log_probs

    def learn(
        self, microbatches: list[Microbatch], loss: step.LossFunction, *, normalizer: float, lr: float
    ) -> step.UpdateStats:
        """One optimizer update; `normalizer` is the global batch's N of the chosen normalization."""
        return step.learn(
            self.models,
            self.optimizer,
            microbatches,
            loss,
            self.parallel,
            normalizer=normalizer,
            lr=lr,
            largest_norm=self._largest_norm,
            before_update=self._settle,
        )

    @functools.cached_property
    def exporter(self) -> Exporter:
        """Brings the policy's parameters together under Hugging Face's names, in `model.dtype`.

        Made once, by all ranks together: where the parameters lie does not change during a run.
        """
        return Exporter(self.models, self.hf, tp_rank=self.parallel.tp_rank, tp_size=self.parallel.tp_size)

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The policy under Hugging Face's names, tensor by tensor: whole on rank 0, None elsewhere.

        Every rank must exhaust the iterator. The tensors may be the model's own memory: copy what is to
        outlive the next update.
        """
        return self.exporter.to_rank_0(share=True)

    def checkpoints(self, directory: Path, *, keep_last: int, keep_every: int = 0) -> Checkpoints:
        """Where this run's checkpoints are written."""
        return Checkpoints(
            directory,
            self.parallel,
            hf_dir=self._hf_dir,
            keep_last=keep_last,
            keep_every=keep_every,
        )

    def save(
        self, checkpoints: Checkpoints, steps: int, run_state: dict[str, Any], *, background: bool
    ) -> None:
        """Begin to write the checkpoint after `steps` finished steps; the next update waits where it must."""
        self._settle = checkpoints.settle
        checkpoints.save(steps, self.models, self.optimizer, run_state, background=background)

    def load(self, path: Path) -> None:
        """Load a checkpoint's weights and optimizer in place."""
        checkpoint.load(path, self.models, self.optimizer)
