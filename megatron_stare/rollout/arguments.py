"""Command lines and environments of SGLang servers and of sglang-router. Pure functions of the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_stare.config.schema import RolloutSection
from megatron_stare.errors import UserError

CPU_CACHE_TOKENS = 65_536
# What a server calls the weights it starts with. No publisher's version, so that a server that was
# restarted never passes for one that has the current weights.
INITIAL_VERSION = "initial"
_OWNED = ("model_path", "host", "port", "api_key", "device", "tp_size", "tp")


def server_arguments(
    rollout: RolloutSection, model_path: str, dtype: str, *, device: str, index: int, port: int, seed: int,
    first_gpu: int = 0,
) -> list[str]:  # fmt: skip
    """SGLang's arguments of server number `index`.

    `device` is "cpu" or "cuda"; `first_gpu` is the first GPU of server 0, the others follow.
    `rollout.server_args` has the last word on all but the few the fleet itself depends on.
    Raises UserError when it names one of those.
    """
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "host": rollout.host,
        "port": port,
        "device": device,
        "dtype": dtype,
        "tp_size": rollout.tp,
        "context_length": rollout.context_length,
        "max_running_requests": rollout.max_running_requests,
        # Two servers with one seed would sample the same noise.
        "random_seed": (seed * 1_000_003 + index) % 2**31,
        "weight_version": INITIAL_VERSION,
        # Token ids in, token ids out: text is nobody's business here.
        "skip_tokenizer_init": True,
        # SGLang's own warm-up sends fixed ids, and one outside a small vocabulary ends the server.
        "skip_server_warmup": True,
        "log_level_http": "warning",
    }
    if rollout.seeded:
        arguments["enable_deterministic_inference"] = True
    arguments |= _cpu_arguments(rollout) if device == "cpu" else _gpu_arguments(rollout, index, first_gpu)
    for name, value in rollout.server_args.items():
        name = name.lstrip("-").replace("-", "_")
        if name in _OWNED:
            raise UserError(f"rollout.server_args.{name} is not allowed: the run sets it itself")
        arguments[name] = value
    return _render(arguments)


def _cpu_arguments(rollout: RolloutSection) -> dict[str, Any]:
    wanted = min(rollout.max_running_requests * rollout.context_length, CPU_CACHE_TOKENS)
    # Where others' cached prefixes, or room in a batch, decide how a prompt is cut, its last bits vary.
    whole_prompts = {
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        # Its default supposes chunks, and goes below 0 without. The cache is no larger for it.
        "mem_fraction_static": 0.8,
    }
    return {
        **(whole_prompts if rollout.seeded else {}),
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        # By default the cache takes a share of the machine's memory, which the trainer needs.
        "max_total_tokens": rollout.max_total_tokens or max(wanted, rollout.context_length),
        # An idle server otherwise spins on one core, and the trainer is on the same few.
        "sleep_on_idle": True,
    }


def _gpu_arguments(rollout: RolloutSection, index: int, first_gpu: int) -> dict[str, Any]:
    return {
        "base_gpu_id": first_gpu + index * rollout.tp,
        "mem_fraction_static": rollout.memory_fraction,
        "max_total_tokens": rollout.max_total_tokens,
    }


def router_arguments(
    rollout: RolloutSection, servers: list[str], *, port: int, metrics_port: int
) -> list[str]:
    """sglang-router's arguments.

    Retries and circuit breaking are off: the client retries itself, and a breaker that opened during a
    weight update would refuse a minute's samples. The health check only takes dead servers out.
    """
    return _render(
        {
            "host": rollout.host,
            "port": port,
            "worker_urls": servers,
            "policy": "round_robin",
            "request_timeout_secs": int(rollout.request_timeout) + 1,
            "worker_startup_timeout_secs": int(rollout.start_timeout) + 1,
            "worker_startup_check_interval": 1,
            "health_check_interval_secs": 5,
            "health_failure_threshold": 3,
            "health_success_threshold": 1,
            "disable_retries": True,
            "disable_circuit_breaker": True,
            "max_concurrent_requests": -1,
            # On by default, on a fixed port and on all interfaces.
            "prometheus_host": rollout.host,
            "prometheus_port": metrics_port,
            "log_level": "warn",
        }
    )


def server_environment(rollout: RolloutSection, device: str) -> dict[str, str]:
    """Environment variables that a server needs besides those of this process."""
    values = {
        # Weights and configs are local: nothing is to be fetched, or waited for.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # /health would generate a token each time, and fail while generation is paused for an update.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    if rollout.seeded:
        # A server that admits more than its cache holds gives some up in the midst and reads them anew, in
        # another way. So room for the longest response is kept for each.
        values["SGLANG_INIT_NEW_TOKEN_RATIO"] = values["SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR"] = "1"
        values["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] = str(rollout.max_response_tokens)
    if device == "cpu":
        values["OMP_NUM_THREADS"] = str(rollout.threads)
        # glibc gives large buffers back at once and asks for them anew, and the system clears each page
        # again: a third of the time of a weight update. Kept instead, up to 1 GiB.
        values["MALLOC_MMAP_THRESHOLD_"] = values["MALLOC_TRIM_THRESHOLD_"] = str(1 << 30)
    return values


def _render(arguments: Mapping[str, Any]) -> list[str]:
    """`--name value` for each; True is a bare flag, None and False are left out, lists have many values."""
    line: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        line.append("--" + name.replace("_", "-"))
        if value is not True:
            line += [str(item) for item in (value if isinstance(value, list | tuple) else [value])]
    return line
