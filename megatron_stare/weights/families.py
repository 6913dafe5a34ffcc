"""What each model family's tensors are called in Hugging Face and in Megatron.

A family is a declaration: the tensors, and what its layers have (biases,
per-head norms). Nothing here computes; `layouts.py` knows the layouts and
`mapping.py` expands a family for one model.

Templates: {l} is the layer number and {e} the expert's, both counted from 0 over the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["replicated", "replicated_matrix", "vocab", "row", "column", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that it holds.

    Attributes:
        local: parameter name with Megatron's local layers, where norms are modules of their own.
        hf: Hugging Face names, in the order in which `kind` packs them.
        kind: layout of the parameter (see `layouts.py`).
        fused: name with Transformer Engine layers where it differs (a norm folded into the next linear, the
            experts of a rank in one module).
        size: the HFConfig field that is the length of a replicated parameter, the rows of a column-split
            one or of a gate, or the input columns of a row-split one.
        key: name in Megatron's distributed checkpoints, where layers and experts are axes of one tensor;
            default: the fused name without the numbers.
        tied_to: the Hugging Face tensor that the parameter repeats when embeddings are tied.
    """

    local: str
    hf: tuple[str, ...]
    kind: Kind
    fused: str | None = None
    size: str = "hidden_size"
    key: str | None = None
    tied_to: str | None = None

    @property
    def is_expert(self) -> bool:
        """Whether there is one such parameter an expert."""
        return "{e}" in self.local


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: short name; `model_type` in config.json.
        architecture: class name in config.json's `architectures`.
        before, layer, after: rules in Hugging Face's order: embedding, one layer, head.
        qkv_bias: query, key and value projections have biases.
        qk_norm: queries and keys are normalised per head.
        experts: every layer's MLP is a mixture of experts.
        head_dim: where config.json names none; None: hidden_size / num_attention_heads.
        sliding_window_default: what a config.json without `sliding_window` means; None: the window is off
            unless `use_sliding_window` says otherwise.
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
    experts: bool = False
    head_dim: int | None = None
    sliding_window_default: int | None = None
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
_MLP_NORM = f"{_M}pre_mlp_layernorm.weight"
_MLP = (
    Rule(
        _MLP_NORM,
        (f"{_H}post_attention_layernorm.weight",),
        "replicated",
        fused=f"{_M}mlp.linear_fc1.layer_norm_weight",
    ),
    Rule(
        f"{_M}mlp.linear_fc1.weight",
        (f"{_H}mlp.gate_proj.weight", f"{_H}mlp.up_proj.weight"),
        "gate_up",
        size="ffn_size",
    ),
    Rule(f"{_M}mlp.linear_fc2.weight", (f"{_H}mlp.down_proj.weight",), "row", size="ffn_size"),
)


def _expert(linear: str, hf: tuple[str, ...], kind: Kind) -> Rule:
    return Rule(
        f"{_M}mlp.experts.local_experts.{{e}}.{linear}.weight",
        tuple(f"{_H}mlp.experts.{{e}}.{name}.weight" for name in hf),
        kind,
        fused=f"{_M}mlp.experts.{linear}.weight{{e}}",
        size="expert_ffn_size",
        key=f"decoder.layers.mlp.experts.experts.{linear}.weight",
    )


# A norm before a router is never folded into a linear: both kinds of layers have it apart.
_MOE = (
    Rule(_MLP_NORM, (f"{_H}post_attention_layernorm.weight",), "replicated"),
    Rule(f"{_M}mlp.router.weight", (f"{_H}mlp.gate.weight",), "replicated_matrix", size="num_experts"),
    _expert("linear_fc1", ("gate_proj", "up_proj"), "gate_up"),
    _expert("linear_fc2", ("down_proj",), "row"),
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
QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    before=_EMBEDDING,
    layer=(_INPUT_NORM, _qkv("weight"), *_QK_NORM, _ATTENTION_OUT, *_MOE),
    after=_HEAD,
    qk_norm=True,
    experts=True,
    # transformers' Qwen3Moe takes hidden_size / heads where config.json names no head_dim
    refused={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    before=_EMBEDDING,
    layer=(_INPUT_NORM, _qkv("weight"), _ATTENTION_OUT, *_MLP),
    after=_HEAD,
    refused={"attention_bias": False, "mlp_bias": False},
)

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    before=_EMBEDDING,
    layer=(_INPUT_NORM, _qkv("weight"), _ATTENTION_OUT, *_MLP),
    after=_HEAD,
    sliding_window_default=4096,
)

FAMILIES: dict[str, Family] = {f.architecture: f for f in (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL)}
