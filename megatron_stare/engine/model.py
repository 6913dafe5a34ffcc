"""The policy: Megatron's GPTModel built from a Hugging Face config, ending in log-probs and entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_stare.engine.attention import PackedAttention, RMSNorm
from megatron_stare.engine.balance import BalancingRouter
from megatron_stare.engine.device import Device
from megatron_stare.engine.logprob import log_prob_and_entropy
from megatron_stare.engine.parallel import Parallel
from megatron_stare.weights.hf_config import HFConfig


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns log-probs and entropy of the response tokens, not logits.

    The forward pass takes `labels` (int64 [1, T], the token after each position) and `loss_mask`
    (bool [1, T], positions that predict a response token) and returns float32 [2, N].
    """

    temperature: float = 1.0
    real_vocab_size: int = 0

    def forward(self, *args, padding_mask=None, **kwargs):
        """Megatron's, with the padding for balancing routers alone, and cut alike on every stage."""
        if not self.config.moe_aux_loss_coeff:
            return super().forward(*args, **kwargs)
        if self.config.sequence_parallel and not self.pre_process:  # Megatron cuts it on the first stage only
            padding_mask = padding_mask.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()]
        return super().forward(*args, padding_mask=padding_mask, **kwargs)

    def _postprocess(self, hidden_states, labels=None, loss_mask=None, **_unused):
        if not self.post_process:
            return hidden_states
        hidden_TH = hidden_states[:, 0] if hidden_states.shape[1] == 1 else hidden_states.flatten(0, 1)
        # Megatron divides the gradient of a replicated input by nothing: each rank's part must be summed,
        # by the backward pass of the gather (sequence parallel) or of the copy.
        if self.config.sequence_parallel:
            hidden_TH = gather_from_sequence_parallel_region(hidden_TH, tensor_parallel_output_grad=True)
            hidden_NH = hidden_TH[loss_mask[0]]
        else:
            hidden_NH = copy_to_tensor_model_parallel_region(hidden_TH[loss_mask[0]])
        tied = self.share_embeddings_and_output_weights
        weight_VH = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return log_prob_and_entropy(
            hidden_NH,
            weight_VH,
            labels[0][loss_mask[0]],
            vocab_size=self.real_vocab_size,
            temperature=self.temperature,
            group=self.tp_group,
        )


def padded_vocab_size(vocab_size: int, tp: int, multiple: int) -> int:
    """The vocabulary rounded up so that every tensor-parallel rank holds a multiple of `multiple` rows."""
    step = tp * multiple
    return -(-vocab_size // step) * step


def transformer_config(
    hf: HFConfig,
    parallel: Parallel,
    device: Device,
    *,
    dtype: torch.dtype,
    recompute: str = "none",
    expert_balance: float = 0.0,
    precision: dict | None = None,
) -> TransformerConfig:
    """Megatron's config for a Hugging Face architecture. Fusions that need CUDA are left to the TE layers.

    `expert_balance`: coefficient of the auxiliary loss that spreads tokens over experts. `precision`: FP8's
    arguments (`precision_fields`).
    """
    recomputing = {
        "none": {},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "selective": {"recompute_granularity": "selective"},
    }[recompute]
    # On gloo the default point-to-point calls pair two messages between the same ranks wrongly once stages
    # are virtual; the overlapped, unbatched calls do not.
    interleaved = {"overlap_p2p_comm": True, "batch_p2p_comm": False} if parallel.vpp_size else {}
    return TransformerConfig(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.ffn_size,
        num_attention_heads=hf.num_heads,
        num_query_groups=hf.num_kv_heads,
        kv_channels=hf.head_dim,
        layernorm_epsilon=hf.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.qkv_bias,
        qk_layernorm=hf.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp_size,
        pipeline_model_parallel_size=parallel.pp_size,
        virtual_pipeline_model_parallel_size=parallel.vpp_size,
        context_parallel_size=parallel.cp_size,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Our loss arrives divided by the global count; Megatron must add gradients up, never average.
        calculate_per_token_loss=True,
        use_cpu_initialization=device.kind == "cpu",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        **_moe_arguments(hf, parallel, device, expert_balance),
        **(precision or {}),
        **interleaved,
        **recomputing,
    )


def _moe_arguments(hf: HFConfig, parallel: Parallel, device: Device, balance: float) -> dict:
    if not hf.num_experts:
        return {}
    return {
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.expert_ffn_size,
        "moe_router_topk": hf.experts_per_token,
        # The softmax over the chosen experts alone is the rescaled one over all.
        "moe_router_pre_softmax": not hf.normalize_experts,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if balance else "none",
        "moe_aux_loss_coeff": balance,
        "moe_token_dispatcher_type": device.dispatcher,
        "moe_grouped_gemm": device.layers == "transformer_engine",
        "expert_model_parallel_size": parallel.ep_size,
        "expert_tensor_parallel_size": 1,
    }


def _block_spec(config: TransformerConfig, layers: str, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Layer specs of this rank's stage, and the final norm."""
    if layers == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        norm = TENorm
    else:
        layer = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        parts, norm = layer.submodules, RMSNorm
        if config.num_moe_experts:
            # In checkpoints this norm is called as with Transformer Engine, which leaves it apart here.
            parts.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = norm
    if config.moe_aux_loss_coeff:
        layer.submodules.mlp.submodules.router = BalancingRouter
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def rope_arguments(hf: HFConfig) -> dict:
    """GPTModel's arguments for the model's rotary embedding."""
    arguments = {"rotary_base": hf.rope_theta}
    if hf.rope_scaling:  # reading the config refused all but Llama 3's, whose other constants Megatron fixes
        arguments |= {"rope_scaling": True, "rope_scaling_factor": hf.rope_scaling["factor"]}
    return arguments


def build_models(
    hf: HFConfig,
    config: TransformerConfig,
    parallel: Parallel,
    device: Device,
    *,
    layers: str,
    vocab_multiple: int = 128,
    temperature: float = 1.0,
) -> list[torch.nn.Module]:
    """This rank's part of the policy, one module a virtual pipeline stage, with unset weights."""
    models = []
    for stage in range(parallel.vpp_size or 1):
        vp_stage = stage if parallel.vpp_size else None
        where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
        model = PolicyModel(
            config=config,
            transformer_layer_spec=_block_spec(config, layers, vp_stage),
            vocab_size=padded_vocab_size(hf.vocab_size, parallel.tp_size, vocab_multiple),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=is_pipeline_first_stage(**where),
            post_process=is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=hf.tied_embeddings,
            position_embedding_type="rope",
            vp_stage=vp_stage,
            **rope_arguments(hf),
        )
        model.temperature, model.real_vocab_size = temperature, hf.vocab_size
        model.to(device.torch)
        models.append(Float16Module(config, model) if config.bf16 else model)
    return models
