"""Checks of a configuration against the disk, the model and the machine, before anything starts.

What the values alone decide is in `schema.py`. Here all problems are collected, so that a person mends
them in one go. Heavy packages are imported only by the checks that need them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_stare.config.load import ConfigError
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_stare.weights.hf_config import HFConfig

# Any of these in a directory means that a run was there.
_TRACES = ("config.yaml", "metrics.jsonl", "checkpoints", "journal")


def check_config(config: Config, world_size: int) -> None:
    """Raises ConfigError with a line for everything that keeps this run from starting.

    Args:
        config: a loaded configuration.
        world_size: number of trainer ranks.
    """
    if problems := find_problems(config, world_size):
        raise ConfigError(problems)


def find_problems(config: Config, world_size: int) -> list[str]:
    """The same as a list, empty if all is well."""
    return [
        *_check_layout(config, world_size),
        *_check_layers(config),
        *_check_offload(config),
        *_check_batch(config, world_size),
        *_check_objective(config),
        *_check_rollout(config),
        *_check_model(config),
        *_check_packages(config),
        *_check_run_dir(config),
    ]


def find_model_problems(config: Config, world_size: int, model: HFConfig) -> list[str]:
    """Those that config and architecture decide, on whatever machine the run will be."""
    return [
        *_check_layout(config, world_size),
        *_check_split(config, model),
        *_check_batch(config, world_size),
        *_check_objective(config),
    ]


def run_directory(config: Config) -> Path:
    """Where the run keeps its files: `run.dir`, or runs/NAME."""
    return Path(config.run.dir) if config.run.dir is not None else Path("runs") / config.run.name


def _check_layout(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    if world_size % parallel.model_size:
        sizes = f"tp={parallel.tp} * pp={parallel.pp}" + (f" * cp={parallel.cp}" if parallel.cp > 1 else "")
        yield (
            f"parallel: {world_size} trainer ranks are not a multiple of {sizes} = {parallel.model_size}; "
            f"set parallel.world_size to a multiple, or change the sizes"
        )
    elif (stage := world_size // parallel.pp) % parallel.ep:
        yield (
            f"parallel.ep={parallel.ep}: does not divide the {stage} ranks of a pipeline stage "
            f"(tp * cp * data-parallel replicas); allowed: {_divisors(stage)}"
        )


def _check_model(config: Config) -> Iterator[str]:
    from megatron_stare.weights.hf_config import read_hf_config

    tokenizer = None
    try:
        model = read_hf_config(config.model.path)
    except UserError as error:
        yield f"model.path={config.model.path}: {error}"
    else:
        yield from _check_split(config, model)
        yield from _check_precision(config, model)
        from megatron_stare.tasks.tokenizer import load_tokenizer

        try:
            tokenizer = load_tokenizer(config.model.path)
        except UserError as error:
            yield str(error)
    yield from _check_task(config, tokenizer)


def _check_layers(config: Config) -> Iterator[str]:
    if config.model.layers != "transformer_engine":
        return
    import torch

    if not torch.cuda.is_available():
        yield "model.layers=transformer_engine: needs a CUDA GPU, and none is here; allowed: auto, local"
    elif importlib.util.find_spec("transformer_engine") is None:
        yield (
            "model.layers=transformer_engine: the package transformer-engine is not installed; "
            "install megatron_stare[gpu], or use local"
        )


def _check_offload(config: Config) -> Iterator[str]:
    if not config.parallel.optimizer_offload:
        return
    import torch

    if not torch.cuda.is_available():
        yield (
            f"parallel.optimizer_offload={config.parallel.optimizer_offload:g}: moves the optimizer's state "
            "out of a GPU's memory, and no GPU is here; allowed: 0"
        )


def _check_precision(config: Config, model: HFConfig) -> Iterator[str]:
    from megatron_stare.engine.precision import matrix_widths, precision_problems, this_machine

    section = config.model
    yield from precision_problems(
        section.fp8,
        this_machine(),
        dtype=section.dtype,
        layers=model.num_layers,
        widths=matrix_widths(model, config.parallel.tp),
        keep_ends=section.fp8_keep_ends,
        fp8_parameters=section.fp8_parameters,
    )


def _check_split(config: Config, model: HFConfig) -> Iterator[str]:
    parallel, rollout = config.parallel, config.rollout
    widths = {"attention heads": model.num_heads, "key-value heads": model.num_kv_heads}
    if model.dense_ffn_size:
        widths["feed-forward columns"] = model.dense_ffn_size
    for name, size in widths.items():
        if size % parallel.tp:
            yield (
                f"parallel.tp={parallel.tp}: does not divide the model's {size} {name}; "
                f"allowed: {_divisors(*widths.values())}"
            )
            break
    yield from _check_experts(config, model)
    stages = parallel.pp * (parallel.vpp or 1)
    if model.num_layers % stages:
        keys = f"parallel.pp={parallel.pp}" + (f" * parallel.vpp={parallel.vpp}" if parallel.vpp else "")
        yield (
            f"{keys}: {stages} stages do not divide the model's {model.num_layers} layers; "
            f"allowed: {_divisors(model.num_layers)}"
        )
    if config.objective != "rl":
        return
    if rollout.context_length > model.max_position_embeddings:
        yield (
            f"rollout.context_length={rollout.context_length}: the model knows positions up to "
            f"{model.max_position_embeddings}; allowed: at most that"
        )
    # SGLang copies key-value heads when there are fewer of them than ranks.
    shares = model.num_kv_heads % rollout.tp == 0 or rollout.tp % model.num_kv_heads == 0
    if not rollout.endpoints and (model.num_heads % rollout.tp or not shares):
        yield (
            f"rollout.tp={rollout.tp}: does not divide the model's {model.num_heads} attention heads and "
            f"{model.num_kv_heads} key-value heads; allowed: {_divisors(model.num_heads, model.num_kv_heads)}"
        )


def _check_experts(config: Config, model: HFConfig) -> Iterator[str]:
    parallel = config.parallel
    if not model.num_experts:
        if parallel.ep > 1:
            yield f"parallel.ep={parallel.ep}: the model has no experts; allowed: 1"
        if parallel.expert_balance:
            yield f"parallel.expert_balance={parallel.expert_balance:g}: the model has no experts; allowed: 0"
        return
    if model.num_experts % parallel.ep:
        yield (
            f"parallel.ep={parallel.ep}: does not divide the model's {model.num_experts} experts; "
            f"allowed: {_divisors(model.num_experts)}"
        )
    # Megatron adds up expert gradients over tensor-parallel ranks only where experts are shared out, and
    # trains them there only with sequence parallelism.
    if parallel.tp > 1 and parallel.ep == 1:
        yield (
            f"parallel.tp={parallel.tp}: a model with experts needs expert parallelism beside it: "
            f"set parallel.ep, for example to {parallel.tp}, or use parallel.tp=1"
        )
    elif parallel.tp > 1 and not parallel.sequence_parallel:
        yield (
            f"parallel.sequence_parallel=false: a model with experts needs it with "
            f"parallel.tp={parallel.tp}; set it to true"
        )


def _divisors(*sizes: int) -> str:
    """Sizes that divide all of these, as text."""
    return ", ".join(str(n) for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes))


def _check_batch(config: Config, world_size: int) -> Iterator[str]:
    batch, parallel = config.batch, config.parallel
    rl = config.objective == "rl"
    # Context parallelism pads every sequence to a multiple of 2 * cp.
    multiple = 2 * parallel.cp if parallel.cp > 1 else 1
    longest = config.task.max_prompt_tokens + config.rollout.max_response_tokens
    longest = -(-longest // multiple) * multiple
    if rl and longest > batch.max_tokens_per_microbatch:
        padded = f", padded to a multiple of 2 * parallel.cp={parallel.cp}" if multiple > 1 else ""
        yield (
            f"batch.max_tokens_per_microbatch={batch.max_tokens_per_microbatch}: the longest sequence does "
            f"not fit (task.max_prompt_tokens={config.task.max_prompt_tokens} + "
            f"rollout.max_response_tokens={config.rollout.max_response_tokens}{padded}); "
            f"allowed: at least {longest}"
        )
    dp = world_size // parallel.model_size
    responses = batch.prompts_per_step * (batch.responses_per_prompt if rl else 1) // batch.updates_per_step
    if dp > 0 and responses % dp:
        factors = "batch.prompts_per_step" + (" * batch.responses_per_prompt" if rl else "")
        yield (
            f"{factors} / batch.updates_per_step = {responses}: is not a multiple of the "
            f"{dp} data-parallel ranks"
        )


def _check_objective(config: Config) -> Iterator[str]:
    if config.objective != "rl":
        return
    from megatron_stare.config.parts import entropy_control, gate_config, objective_spec
    from megatron_stare.objective import check_combination

    algorithm, stare = config.algorithm, config.stare
    if stare.enabled:
        try:
            gate_config(stare)
        except (TypeError, ValueError) as error:
            yield f"stare: {error}"
    try:
        check_combination(
            objective_spec(algorithm),
            control=entropy_control(algorithm),
            stare=stare.enabled,
            updates_per_step=config.batch.updates_per_step,
        )
    except ValueError as error:
        yield f"algorithm: {error}"


def _check_rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if config.objective != "rl":
        return
    for url in rollout.endpoints:
        if not url.startswith(("http://", "https://")):
            yield f"rollout.endpoints={url}: must be a URL, like http://10.0.0.1:30000"
    yield from _check_wire(config)
    if rollout.endpoints:
        return
    if importlib.util.find_spec("sglang") is None:
        yield (
            "rollout.servers: the package sglang is not installed; "
            "install it, or name running servers in rollout.endpoints"
        )
    if rollout.router and importlib.util.find_spec("sglang_router") is None:
        yield "rollout.router=true: the package sglang-router is not installed; install it, or use false"
    if rollout.port is not None and (reason := _port_problem(rollout.host, rollout.port)):
        yield f"rollout.port={rollout.port}: {reason} on {rollout.host}; use another, or null for a free one"


def _check_wire(config: Config) -> Iterator[str]:
    rollout = config.rollout
    file = Path(rollout.model_path or config.model.path) / "config.json"
    if rollout.model_path is not None and not file.is_file():
        yield f"rollout.model_path={rollout.model_path}: is not a Hugging Face directory (no config.json)"
    if rollout.wire == "trainer" or not file.is_file():
        return
    import torch

    if not torch.cuda.is_available() and not rollout.endpoints:
        yield "rollout.wire=fp8_blockwise: SGLang's FP8 needs a GPU, and none is here; allowed: trainer"
    quantisation = json.loads(file.read_text(encoding="utf-8")).get("quantization_config") or {}
    if quantisation.get("weight_block_size") != [128, 128]:
        yield (
            f"rollout.wire=fp8_blockwise: the servers' model {file.parent} is not block-wise FP8; "
            "make one with `megatron-stare export --quant fp8_blockwise` and name it in rollout.model_path"
        )


def _port_problem(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None


def _check_task(config: Config, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[str]:
    """Opens what the run will open: every row of a file is read, every function imported."""
    from megatron_stare.tasks.data import open_source
    from megatron_stare.tasks.reward import check_reward
    from megatron_stare.tasks.rows import open_rows

    sources = {"task.source": config.task.source}
    if config.evaluation.source:
        sources["evaluation.source"] = config.evaluation.source
    for key, source in sources.items():
        task = config.task.model_copy(update={"source": source})
        try:
            if tokenizer is None:
                open_rows(task.source, task.size, config.run.seed, task.source_args)
            else:
                open_source(task, tokenizer, config.run.seed)
        except UserError as error:
            yield str(error) if key == "task.source" else f"{key}={source}: {error}"
    if config.objective == "rl":
        try:
            check_reward(config.task)
        except ImportError as error:
            yield f"task.reward={config.task.reward}: the package {error.name} is not installed"
        except UserError as error:
            yield str(error)


def _check_packages(config: Config) -> Iterator[str]:
    for name in ("tensorboard", "wandb"):
        if getattr(config.report, name) and importlib.util.find_spec(name) is None:
            yield f"report.{name}=true: the package {name} is not installed; install it, or use false"


def _check_run_dir(config: Config) -> Iterator[str]:
    path = run_directory(config)
    key = f"run.dir={path}" if config.run.dir is not None else f"run.name={config.run.name}: {path}"
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        yield f"{key}: {existing} is a file, not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{key}: {existing} is not writeable"
    elif config.resume.mode == "never" and any((path / trace).exists() for trace in _TRACES):
        yield (
            f"{key} already holds a run: continue it with resume.mode=auto, "
            "or choose another run.name or run.dir"
        )
