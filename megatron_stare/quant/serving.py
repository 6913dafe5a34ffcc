"""At which tensor-parallel sizes SGLang serves a block-wise FP8 checkpoint.

SGLang keeps a shard's blocks whole, so the sizes of a model's linears decide. The rules are those of SGLang
0.5.23: `Fp8LinearMethod.validate_block_quant_shapes` and `Fp8MoEMethod` (layers/quantization/fp8.py) for
weights, `per_token_group_quant_fp8` (kernels/ops/quantization/fp8_kernel.py) for activations.
"""

from __future__ import annotations

from megatron_stare.quant.blockwise import BLOCK
from megatron_stare.weights.hf_config import HFConfig

SGLANG = "0.5.23"
_SIZES = (1, 2, 4, 8, 16, 32)


def blockwise_tp_sizes(config: HFConfig) -> list[int]:
    """Tensor-parallel sizes (powers of 2 up to 32) that SGLang accepts."""
    return [tp for tp in _SIZES if not obstacles(config, tp)]


def obstacles(config: HFConfig, tp: int) -> list[str]:
    """Why SGLang refuses the checkpoint at this size: "what is how long"; empty if it does not."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    larger, smaller = max(kv_heads, tp), min(kv_heads, tp)
    if heads % tp or larger % smaller:
        return [f"{heads} query and {kv_heads} key-value heads over {tp} processes"]
    # Key-value heads are repeated where there are fewer than processes.
    queries, keys = heads // tp * config.head_dim, max(1, kv_heads // tp) * config.head_dim
    inner = config.expert_ffn_size or config.ffn_size
    if inner % tp:
        return [f"an MLP of {inner} over {tp} processes"]
    share = f" a process at tp {tp}" if tp > 1 else ""
    sizes = {
        "hidden size": (config.hidden_size, ""),  # activations are quantised in groups of 128
        "query rows": (queries, share),
        "key rows": (keys, share),
        "MLP rows": (inner // tp, share),
    }
    return [f"{what} {size}{where}" for what, (size, where) in sizes.items() if size % BLOCK]


def describe(config: HFConfig) -> tuple[str, bool]:
    """One line on where SGLang serves the checkpoint, and whether it does anywhere."""
    sizes = blockwise_tp_sizes(config)
    if sizes:
        return f"by its own rules SGLang {SGLANG} serves it at tp {', '.join(map(str, sizes))}", True
    why = "; ".join(obstacles(config, 1))
    return (
        f"SGLang {SGLANG} refuses block-wise FP8 of this model at any tp: it needs multiples of {BLOCK}, "
        f"and this has {why} (transformers misreads partial blocks, too). --quant fp8 has no such rule",
        False,
    )
