"""Reading a Hugging Face config.json, and refusing what the Megatron model would not compute."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_stare.errors import UserError
from megatron_stare.weights.families import FAMILIES, Family

# Megatron's RotaryEmbedding has these two and the original length built in; only the factor is an argument.
_LLAMA3_FIXED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class HFConfig:
    """Shape of a causal language model, in one vocabulary for all families.

    Attributes:
        architecture: class name, e.g. "Qwen3ForCausalLM".
        rope_scaling: None, or {"rope_type": "llama3", "factor": float, …} as in config.json.
        qkv_bias: query, key and value projections have biases.
        qk_norm: queries and keys are normalised per head.
        num_experts: experts a layer; 0 for a dense model.
        experts_per_token: how many of them a token goes to.
        expert_ffn_size: inner width of one expert.
        normalize_experts: the chosen experts' probabilities are rescaled to sum to 1.
        raw: config.json as it was read.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    normalize_experts: bool = False
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def family(self) -> Family:
        """The declaration of this model's tensors."""
        return FAMILIES[self.architecture]

    @property
    def attention_size(self) -> int:
        """Width of all query heads together: the input of the attention's output projection."""
        return self.num_heads * self.head_dim

    @property
    def dense_ffn_size(self) -> int:
        """Inner width that tensor parallelism has to cut; 0 where every MLP is a mixture of experts."""
        return 0 if self.num_experts else self.ffn_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of config.json (none, one or several)."""
        value = self.raw.get("eos_token_id")
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (value,)


def read_hf_config(path: str | Path) -> HFConfig:
    """Read config.json of a Hugging Face checkpoint directory.

    Both spellings of the rotary settings are understood: `rope_parameters`
    (transformers 5) and `rope_theta` with `rope_scaling` (older).

    Args:
        path: the checkpoint directory.

    Raises:
        UserError: directory or config.json missing or unreadable, unknown architecture, or a setting
            (activation, bias, sliding window, rope scaling, quantisation) that the Megatron model does
            not honour. The message names file, field and value.
    """
    directory = Path(path)
    file = directory / "config.json"
    if not directory.is_dir():
        raise UserError(
            f"model directory {directory} does not exist (a local Hugging Face checkpoint is needed)"
        )
    if not file.is_file():
        raise UserError(f"{directory} is not a Hugging Face checkpoint: it has no config.json")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{file} does not hold a JSON object")
    return parse_hf_config(raw, file)


def parse_hf_config(raw: dict[str, Any], file: str | Path = "config.json") -> HFConfig:
    """The same for a config already read; `file` names its origin in errors."""
    family = _family(raw, file)
    for key, accepted in family.refused.items():
        if (raw.get(key) or accepted) != accepted:
            raise UserError(
                f"{file}: {key}={raw[key]} is not supported for {family.architecture}; only {accepted} is"
            )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"{file}: hidden_act={raw['hidden_act']!r} is not supported; only 'silu' is")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UserError(
            f"{file}: the checkpoint is quantised ({method}); training needs the unquantised weights"
        )
    layers, hidden, heads = (
        _size(raw, k, file) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    _refuse_sliding_window(raw, family, layers, file)
    kv_heads = _size(raw, "num_key_value_heads", file, default=heads)
    if heads % kv_heads:
        raise UserError(f"{file}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    if raw.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise UserError(f"{file}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    theta, scaling = _rope(raw, file)
    return HFConfig(
        architecture=family.architecture,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=_size(raw, "intermediate_size", file),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_size(raw, "head_dim", file, default=family.head_dim or hidden // heads),
        vocab_size=_size(raw, "vocab_size", file),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_position_embeddings=_size(raw, "max_position_embeddings", file),
        **(_experts(raw, file) if family.experts else {}),
        raw=raw,
    )


def _family(raw: dict[str, Any], file: str | Path) -> Family:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    if not names:
        for family in FAMILIES.values():
            if family.name == raw.get("model_type"):
                return family
    known = ", ".join(sorted(FAMILIES))
    found = ", ".join(names) or raw.get("model_type") or "none named"
    raise UserError(f"{file}: architecture {found} is not supported; known: {known}")


def _size(raw: dict[str, Any], key: str, file: str | Path, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{file}: {key} must be a positive whole number, not {value!r}")
    return value


def _experts(raw: dict[str, Any], file: str | Path) -> dict[str, Any]:
    spelling = "num_local_experts" if "num_local_experts" in raw else "num_experts"  # transformers 5 and 4
    experts, chosen = _size(raw, spelling, file), _size(raw, "num_experts_per_tok", file)
    if chosen > experts:
        raise UserError(f"{file}: num_experts_per_tok={chosen} is more than {spelling}={experts}")
    return {
        "num_experts": experts,
        "experts_per_token": chosen,
        "expert_ffn_size": _size(raw, "moe_intermediate_size", file),
        "normalize_experts": bool(raw.get("norm_topk_prob", False)),
    }


def _refuse_sliding_window(raw: dict[str, Any], family: Family, layers: int, file: str | Path) -> None:
    if family.sliding_window_default is not None:
        if raw.get("sliding_window", family.sliding_window_default) is not None:
            raise UserError(
                f"{file}: sliding-window attention is active and not supported; set sliding_window to null "
                "to train with full attention (the same function while no sequence is longer than the window)"
            )
        return
    types = raw.get("layer_types")
    if types is not None:
        active = any(t != "full_attention" for t in types)
    else:  # the rule of transformers' Qwen2Config and Qwen3Config
        active = (
            bool(raw.get("use_sliding_window"))
            and raw.get("sliding_window") is not None
            and raw.get("max_window_layers", 28) < layers
        )
    if active:
        raise UserError(
            f"{file}: sliding-window attention is active and not supported; "
            "set use_sliding_window=false (and layer_types to full_attention) to train with full attention"
        )


def _rope(raw: dict[str, Any], file: str | Path) -> tuple[float, dict[str, Any] | None]:
    new = raw.get("rope_parameters") or {}
    scaling = dict(new) if new else dict(raw.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    partial = scaling.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UserError(f"{file}: partial_rotary_factor={partial} is not supported; only 1.0 is")
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise UserError(f"{file}: rope scaling {kind!r} is not supported; known: default, llama3")
    for key, built_in in _LLAMA3_FIXED.items():
        if scaling.get(key) != built_in:
            raise UserError(
                f"{file}: llama3 rope scaling with {key}={scaling.get(key)} is not supported; "
                f"Megatron has {built_in} built in"
            )
    if not isinstance(scaling.get("factor"), (int, float)) or scaling["factor"] < 1:
        raise UserError(f"{file}: llama3 rope scaling needs factor >= 1, not {scaling.get('factor')!r}")
    scaling.pop("type", None)
    return float(theta), {"rope_type": "llama3", **scaling}
