"""Small random checkpoints that are real: for the quickstart's cold start and for tests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from megatron_stare.errors import UserError
from megatron_stare.weights.families import FAMILIES
from megatron_stare.weights.files import staged_directory
from megatron_stare.weights.reference import no_progress_bar

_EMBEDDING_STD = 0.02


def write_tiny_checkpoint(
    directory: str | Path,
    *,
    architecture: str = "qwen3",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 128,
    vocab_size: int = 128,
    seed: int = 0,
    dtype: str = "float32",
    tied: bool = True,
    max_position_embeddings: int = 1024,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    experts: int = 4,
    experts_per_token: int = 2,
    tokenizer: Any = None,
    **config_fields: Any,
) -> Path:
    """Write a randomly initialised Hugging Face checkpoint (config.json, model.safetensors).

    Weights are normal with standard deviation sqrt(2 / (5 hidden)), the two projections that end on the
    residual stream divided by sqrt(2 layers) ("small init" of Nguyen and Salazar 2019, "Transformers
    without Tears"; Radford et al. 2019, GPT-2), embeddings 0.02: training from scratch starts stably at any
    width, and the first distribution is close to uniform.

    Args:
        directory: made by this function; must not exist.
        architecture: family name: "qwen2", "qwen3", "qwen3_moe", "llama" or "mistral".
        rope_scaling: fields of Llama 3's scaling, e.g. {"rope_type": "llama3", "factor": 8.0, …}.
        experts, experts_per_token: of a mixture-of-experts family; each expert is `ffn` wide.
        seed: of a generator of its own; torch's global one is left as it was.
        dtype: name of the torch dtype that is stored.
        tokenizer: a transformers tokenizer saved beside the weights; its end, pad and begin ids go into
            config.json.
        config_fields: further fields of config.json, e.g. eos_token_id.

    Returns:
        The directory.

    Raises:
        UserError: unknown architecture, or `directory` exists.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    known = sorted(f.name for f in FAMILIES.values())
    if architecture not in known:
        raise UserError(f"architecture {architecture!r} is not known; known: {', '.join(known)}")
    ids = ("eos_token_id", "pad_token_id", "bos_token_id")
    token_ids = {k: getattr(tokenizer, k, None) for k in ids}
    family = next(f for f in FAMILIES.values() if f.name == architecture)
    if family.experts:
        config_fields = {
            "num_experts": experts,
            "num_experts_per_tok": experts_per_token,
            "moe_intermediate_size": ffn,
            "norm_topk_prob": True,
        } | config_fields
    if family.sliding_window_default is not None:
        config_fields = {"sliding_window": None} | config_fields
    config = AutoConfig.for_model(
        architecture,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta, **(rope_scaling or {})},
        tie_word_embeddings=tied,
        initializer_range=math.sqrt(2 / (5 * hidden)),
        **{**token_ids, **config_fields},
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.div_(math.sqrt(2 * layers))
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                # A tied embedding's product with itself grows with the width: larger ones would make the
                # untrained model repeat its input.
                parameter.mul_(_EMBEDDING_STD / config.initializer_range)
    with staged_directory(directory) as stage:
        save_model(model.to(getattr(torch, dtype)), stage)
        if tokenizer is not None:
            tokenizer.save_pretrained(stage)
    return Path(directory)


def save_model(model: Any, directory: Path) -> None:
    """transformers' own save_pretrained, without its progress bar."""
    with no_progress_bar():
        model.save_pretrained(directory)
