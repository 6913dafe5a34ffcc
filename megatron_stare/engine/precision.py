"""FP8 training: what a recipe asks of Megatron, and what it needs of GPU, software and model.

Megatron ignores FP8 settings without a word where Transformer Engine is absent, so what a recipe lacks is
found here, before anything starts. Not run on a GPU yet; `quant/emulation.py` shows on a CPU what the
recipes do to a model's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from megatron_stare.weights.hf_config import HFConfig

Recipe = Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"]


@dataclass(frozen=True)
class Machine:
    """What FP8 depends on.

    Attributes:
        capability: of the GPU, like (9, 0) for Hopper; None without CUDA.
        transformer_engine: (major, minor) of the installed version; None without it.
    """

    capability: tuple[int, int] | None
    transformer_engine: tuple[int, int] | None


@dataclass(frozen=True)
class _Needs:
    lowest: tuple[int, int]  # compute capability
    highest: tuple[int, int] | None  # above it another recipe is the right one
    transformer_engine: tuple[int, int]
    gpus: str
    multiple: int  # of which every matrix's sizes must be multiples


# Transformer Engine's versions: those for which Megatron's fp8_utils.get_fp8_recipe has the recipe.
_NEEDS = {
    "delayed": _Needs((8, 9), None, (1, 0), "Ada, Hopper or newer", 16),
    "tensorwise": _Needs((8, 9), None, (2, 2), "Ada, Hopper or newer", 16),
    "blockwise": _Needs((9, 0), (9, 0), (2, 3), "Hopper", 128),
    "mxfp8": _Needs((10, 0), None, (2, 1), "Blackwell or newer", 32),
}


def this_machine() -> Machine:
    """GPU and Transformer Engine of this process."""
    import torch

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return Machine(capability, _transformer_engine_version())


def precision_fields(
    recipe: Recipe, *, keep_ends: int = 0, fp8_parameters: bool = False, experts: bool = False
) -> dict[str, Any]:
    """Arguments of Megatron's TransformerConfig.

    Args:
        recipe: "none" gives no arguments.
        keep_ends: transformer layers at either end that stay in bfloat16.
        fp8_parameters: keep parameters in FP8, so that data-parallel ranks gather half the bytes.
        experts: is the model a mixture of experts? Then tokens of each expert are padded.
    """
    if recipe == "none":
        return {}
    # E5M2 for gradients where a whole tensor has one scale; with a scale a block E4M3 has range enough.
    fields = {
        "fp8": "hybrid" if recipe in ("delayed", "tensorwise") else "e4m3",
        "fp8_recipe": recipe,
        "fp8_param": fp8_parameters,
    }
    if recipe == "delayed":
        fields |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    if experts:
        fields["moe_router_padding_for_quantization"] = True
    if keep_ends:
        fields |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": keep_ends,
            "num_layers_at_end_in_bf16": keep_ends,
        }
    return fields


def sequence_multiple(recipe: Recipe) -> int:
    """Tokens of a microbatch must be a multiple of this on every rank, as FP8's products demand."""
    return 1 if recipe == "none" else _NEEDS[recipe].multiple


def matrix_widths(hf: HFConfig, tp: int) -> dict[str, int]:
    """Sizes of a rank's weight matrices, by name: what FP8's products need multiples of."""
    queries, keys = hf.num_heads * hf.head_dim // tp, 2 * hf.num_kv_heads * hf.head_dim // tp
    widths = {"hidden size": hf.hidden_size, "attention width": queries, "QKV width": queries + keys}
    if hf.dense_ffn_size:
        widths["feed-forward width"] = hf.dense_ffn_size // tp
    if hf.num_experts:
        widths["expert width"] = hf.expert_ffn_size
    return widths


def precision_problems(
    recipe: Recipe,
    machine: Machine,
    *,
    dtype: str,
    layers: int,
    widths: dict[str, int],
    keep_ends: int = 0,
    fp8_parameters: bool = False,
) -> list[str]:
    """Why this recipe cannot train this model here, one line each; empty if it can.

    Args:
        dtype: `model.dtype`.
        layers: transformer layers of the model.
        widths: sizes of the model's matrices on one rank, by name; FP8's products need multiples.
    """
    if recipe == "none":
        given = {"fp8_keep_ends": keep_ends, "fp8_parameters": fp8_parameters}
        return [f"model.{key}={value}: needs model.fp8" for key, value in given.items() if value]
    key, needs = f"model.fp8={recipe}", _NEEDS[recipe]
    problems = _machine_problems(key, needs, machine)
    if machine.capability is None or machine.transformer_engine is None:
        return problems  # nothing else matters here
    if dtype != "bfloat16":
        problems.append(f"{key}: with model.dtype={dtype}; allowed: bfloat16")
    for name, size in widths.items():
        if size % needs.multiple:
            problems.append(f"{key}: {name} is {size} on a rank, not a multiple of {needs.multiple}")
    if keep_ends and recipe == "delayed":
        problems.append(f"model.fp8_keep_ends={keep_ends}: Megatron has it for every recipe but delayed")
    if 2 * keep_ends >= layers:
        problems.append(
            f"model.fp8_keep_ends={keep_ends}: leaves none of the {layers} layers in FP8; "
            f"allowed: 0 to {(layers - 1) // 2}"
        )
    return problems


def _machine_problems(key: str, needs: _Needs, machine: Machine) -> list[str]:
    if machine.capability is None:
        return [f"{key}: needs a CUDA GPU, and none is here; allowed: none"]
    if machine.transformer_engine is None:
        return [f"{key}: the package transformer-engine is not installed; install megatron_stare[gpu]"]
    problems = []
    low, high = needs.lowest, needs.highest
    if machine.capability < low or (high is not None and machine.capability > high):
        fitting = ", ".join(name for name, n in _NEEDS.items() if _fits(machine.capability, n)) or "none"
        capability = ".".join(map(str, machine.capability))
        problems.append(
            f"{key}: needs {needs.gpus}; this GPU has compute capability {capability}; allowed: {fitting}"
        )
    if machine.transformer_engine < needs.transformer_engine:
        wanted, found = (
            ".".join(map(str, v)) for v in (needs.transformer_engine, machine.transformer_engine)
        )
        problems.append(f"{key}: needs Transformer Engine {wanted} or newer; {found} is installed")
    return problems


def _fits(capability: tuple[int, int], needs: _Needs) -> bool:
    return needs.lowest <= capability and (needs.highest is None or capability <= needs.highest)


def _transformer_engine_version() -> tuple[int, int] | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        major, minor, *_ = version("transformer-engine").split(".")
    except PackageNotFoundError:
        return None
    return int(major), int(minor)
