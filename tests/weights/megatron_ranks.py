"""What each rank of the Megatron tests does: load checkpoints into real models, export, compare."""

from __future__ import annotations

import resource
from itertools import product

import torch
import torch.distributed as dist

import megatron_stare.engine  # noqa: F401  prepares the device before Megatron is imported

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file

from megatron_stare.engine.device import current
from megatron_stare.engine.model import padded_vocab_size, rope_arguments, transformer_config
from megatron_stare.engine.parallel import initialize
from megatron_stare.errors import UserError
from megatron_stare.weights import (
    Exporter,
    HFConfig,
    global_parameters,
    load_hf_weights,
    read_hf_config,
    save_hf,
)

PADDED_VOCAB = 512  # for a vocabulary of 250: at TP 2 the second rank holds padding only


def all_cases(checkpoints: dict[str, str], layouts: dict[str, dict]) -> dict[str, dict]:
    """Every checkpoint in every layout that it can take; this rank's findings by "checkpoint/layout"."""
    found = {}
    for layout, sizes in layouts.items():
        parallel = initialize(current(), **sizes, timeout_minutes=2)
        for name, path in checkpoints.items():
            if sizes.get("ep", 1) == 1 or read_hf_config(path).num_experts:
                found[f"{name}/{layout}"] = _case(path, parallel)
        mpu.destroy_model_parallel()
    return found


def saves(source: str, root: str, world: dict) -> dict:
    """What this rank sees of saves that succeed and of saves that must fail, all by the same ranks."""
    parallel = initialize(current(), **world, timeout_minutes=2)
    hf = read_hf_config(source)
    models = _build(hf, parallel, torch.float32)
    load_hf_weights(models, source, hf, tp_rank=parallel.tp_rank, tp_size=parallel.tp_size)

    def attempt(name: str, *, like: str = source, **options) -> str:
        exporter = Exporter(
            models,
            hf,
            tp_rank=parallel.tp_rank,
            tp_size=parallel.tp_size,
            dtype=options.pop("dtype", None),
        )
        try:
            save_hf(f"{root}/{name}", exporter, like, **options)
        except UserError as error:
            return str(error)
        return "saved"

    found = {
        "one_file": attempt("one_file", card="# A card\n"),
        "sharded": attempt("sharded", dtype=torch.bfloat16, max_shard_bytes=50_000),
        "existing": attempt("one_file"),
        "no_config": attempt("no_config", like=root),
        "no_room": attempt("a_file/out"),
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if parallel.rank == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # this rank's disk is full
    found["disk_full"] = attempt("disk_full", max_shard_bytes=50_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return found


def _case(path: str, parallel) -> dict:
    hf = read_hf_config(path)
    dtype = getattr(torch, hf.raw["dtype"])
    models = _build(hf, parallel, dtype)
    load_hf_weights(models, path, hf, tp_rank=parallel.tp_rank, tp_size=parallel.tp_size)
    result = {"unfilled": sum(int(p.isnan().any()) for m in models for p in m.parameters())}
    result |= _export(models, hf, path, parallel)
    if dtype == torch.float32:
        result["logits"] = _logits_difference(models, path, hf, parallel)
    return result


def _build(hf: HFConfig, parallel, dtype: torch.dtype) -> list[torch.nn.Module]:
    """Chunks filled with NaN, so that a number which no one loads is seen; wrapped as in training."""
    config = transformer_config(hf, parallel, current(), dtype=dtype)
    spec = get_gpt_layer_local_spec(
        num_experts=hf.num_experts or None, qk_layernorm=hf.qk_norm, normalization="RMSNorm"
    )
    models = []
    for stage in range(parallel.vpp_size or 1):
        where = {"vp_stage": stage if parallel.vpp_size else None, "ignore_virtual": not parallel.vpp_size}
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=max(PADDED_VOCAB, padded_vocab_size(hf.vocab_size, parallel.tp_size, 128)),
            max_sequence_length=128,
            pre_process=mpu.is_pipeline_first_stage(**where),
            post_process=mpu.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=hf.tied_embeddings,
            position_embedding_type="rope",
            vp_stage=where["vp_stage"],
            **rope_arguments(hf),
        )
        if dtype == torch.bfloat16:
            model = Float16Module(config, model)
            model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        models.append(model.eval())
    return models


def _export(models, hf: HFConfig, path: str, parallel) -> dict:
    exporter = Exporter(models, hf, tp_rank=parallel.tp_rank, tp_size=parallel.tp_size)
    items = list(exporter.to_rank_0())
    result = {"names": [name for name, _ in items], "whole": sum(t is not None for _, t in items)}
    if parallel.rank == 0:
        stored = load_file(f"{path}/model.safetensors")
        own = {p.data_ptr() for p in global_parameters(models).values()}
        result["exact"] = dict(items).keys() == stored.keys() and all(
            t.dtype == stored[name].dtype and torch.equal(t, stored[name]) for name, t in items
        )
        result["aliases"] = sum(t.data_ptr() in own for _, t in items)
    return result


@torch.no_grad()
def _logits_difference(models, path: str, hf: HFConfig, parallel) -> float | None:
    """Largest difference from transformers' logits; None on ranks that do not hold the last layer."""
    reference = torch.load(f"{path}/reference.pt")
    tokens = reference["tokens"]
    batch, length = tokens.shape
    positions = torch.arange(length).expand(batch, -1)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    stages = dist.get_process_group_ranks(parallel.pp_group)
    last = (len(models) - 1, parallel.pp_size - 1)
    for chunk, stage in product(range(len(models)), range(parallel.pp_size)):
        if stage != parallel.pp_rank:
            continue
        if (chunk, stage) != (0, 0):
            hidden = torch.empty(length, batch, hf.hidden_size)
            dist.recv(hidden, stages[stage - 1])
            models[chunk].set_input_tensor(hidden)
        out = models[chunk](tokens, positions, mask)
        if (chunk, stage) != last:
            dist.send(out.contiguous(), stages[(stage + 1) % len(stages)])
    if parallel.pp_rank != last[1]:
        return None
    parts = [torch.empty_like(out) for _ in range(parallel.tp_size)]
    dist.all_gather(parts, out.contiguous(), group=parallel.tp_group)
    logits = torch.cat(parts, -1)[..., : hf.vocab_size]
    return (logits - reference["logits"]).abs().max().item()
