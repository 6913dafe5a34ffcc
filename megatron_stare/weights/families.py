"""What each model family's tensors are called in Hugging Face and in Megatron.

A family is a declaration: the tensors, and what its layers have (biases,
per-head norms). Nothing here computes; `layouts.py` knows the layouts and
`mapping.py` expands a family for one model.

Templates: {l} is the layer number, counted from 0 over the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["replicated", "vocab", "row", "column", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that it holds.

    Attributes:
        local: parameter name with Megatron's local layers, where norms are modules of their own.
        hf: Hugging Face names, in the order in which `kind` packs them.
        kind: layout of the parameter (see `layouts.py`).
        fused: name with Transformer Engine layers where it differs (the norm folded into the next linear).
        size: the HFConfig field that is the length of a replicated parameter, the rows of a column-split
            one, or the input columns of a row-split one.
        tied_to: the Hugging Face tensor that the parameter repeats when embeddings are tied.
    """

    local: str
    hf: tuple[str, ...]
    kind: Kind
    fused: str | None = None
    size: str = "hidden_size"
    tied_to: str | None = None


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: short name; `model_type` in config.json.
        architecture: class name in config.json's `architectures`.
        before, layer, after: rules in Hugging Face's order: embedding, one layer, head.
        qkv_bias: query, key and value projections have biases.
        qk_norm: queries and keys are normalised per head.
        head_dim: where config.json names none; None: hidden_size / num_attention_heads.
        refused: config.json fields that change the function and that the Megatron model does not honour,
            with the only value that is accepted.
        ignored: patterns of Hugging Face tensors that carry no weights (buffers of old versions).
    """

    name: str
    architecture: str
    before: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    after: tuple[Rule, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    refused: dict[str, object] = field(default_factory=dict)
    ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


_M = "decoder.layers.{l}."
_H = "model.layers.{l}."

_EMBEDDING = (Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab"),)
_HEAD = (
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated"),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab", tied_to="model.embed_tokens.weight"),
)


def _qkv(suffix: str) -> Rule:
    return Rule(
        f"{_M}self_attention.linear_qkv.{suffix}",
        tuple(f"{_H}self_attn.{x}_proj.{suffix}" for x in "qkv"),
        "qkv",
    )


_INPUT_NORM = Rule(
    f"{_M}input_layernorm.weight",
    (f"{_H}input_layernorm.weight",),
    "replicated",
    fused=f"{_M}self_attention.linear_qkv.layer_norm_weight",
)
_QK_NORM = tuple(
    Rule(
        f"{_M}self_attention.{x}_layernorm.weight",
        (f"{_H}self_attn.{x}_norm.weight",),
        "replicated",
        size="head_dim",
    )
    for x in "qk"
)
_ATTENTION_OUT = Rule(
    f"{_M}self_attention.linear_proj.weight",
    (f"{_H}self_attn.o_proj.weight",),
    "row",
    size="attention_size",
)
_MLP = (
    Rule(
        f"{_M}pre_mlp_layernorm.weight",
        (f"{_H}post_attention_layernorm.weight",),
        "replicated",
        fused=f"{_M}mlp.linear_fc1.layer_norm_weight",
    ),
    Rule(
        f"{_M}mlp.linear_fc1.weight",
        (f"{_H}mlp.gate_proj.weight", f"{_H}mlp.up_proj.weight"),
        "gate_up",
    ),
    Rule(f"{_M}mlp.linear_fc2.weight", (f"{_H}mlp.down_proj.weight",), "row", size="ffn_size"),
)

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    before=_EMBEDDING,
    layer=(_INPUT_NORM, _qkv("weight"), _qkv("bias"), _ATTENTION_OUT, *_MLP),
    after=_HEAD,
    qkv_bias=True,
    # transformers' Qwen2 takes no such field, but variants of it do
    refused={"use_mrope": False},
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    before=_EMBEDDING,
    layer=(_INPUT_NORM, _qkv("weight"), *_QK_NORM, _ATTENTION_OUT, *_MLP),
    after=_HEAD,
    qk_norm=True,
    head_dim=128,
    # attention_bias puts a bias on the output projection too, which Megatron only has with MLP biases
    refused={"attention_bias": False},
)
LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    before=_EMBEDDING,
    layer=(_INPUT_NORM, _qkv("weight"), _ATTENTION_OUT, *_MLP),
    after=_HEAD,
    refused={"attention_bias": False, "mlp_bias": False},
)

FAMILIES: dict[str, Family] = {f.architecture: f for f in (QWEN2, QWEN3, LLAMA)}
