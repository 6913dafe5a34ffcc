"""A block-wise FP8 checkpoint, written tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_stare.errors import UserError
from megatron_stare.quant.blockwise import BLOCK, FP8, SCALE_SUFFIX, quantize_blockwise, scale_shape
from megatron_stare.quant.source import Source, is_linear
from megatron_stare.weights.save import MAX_SHARD_BYTES, copy_companions, plan_files, write_index
from megatron_stare.weights.stream import SafetensorsStream, TensorSpec


def blockwise_specs(source: Source) -> list[list[TensorSpec]]:
    """What is stored, entry by entry: each linear's weight with its scales, the others as they are."""
    every = []
    for entry in source.entries:
        specs = []
        for name, shape in entry.hf_tensors:
            if is_linear(entry, shape):
                scales = TensorSpec(name + SCALE_SUFFIX, scale_shape(shape), torch.float32)
                specs += [TensorSpec(name, shape, FP8), scales]
            else:
                specs.append(TensorSpec(name, shape, source.dtype))
        every.append(specs)
    return every


def blockwise_bytes(source: Source) -> int:
    """Size of the weights that `write_blockwise` writes."""
    return sum(spec.nbytes for specs in blockwise_specs(source) for spec in specs)


def write_blockwise(
    source: Source, directory: Path, advance: Callable[[int], None], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write weights, index, config and tokenizer. One tensor is held in memory at a time.

    Args:
        directory: an existing one.
        advance: called with the bytes that were written since.
        max_shard_bytes: largest weight file; a linear that SGLang fuses stays in one file and may exceed it.

    Raises:
        UserError: a weight holds NaN or infinity; names the tensor.
    """
    items = [(e, specs, [0]) for e, specs in zip(source.entries, blockwise_specs(source), strict=True)]
    files = plan_files(items, max_shard_bytes)
    for file in files:
        with SafetensorsStream(directory / file.name, file.specs) as stream:
            for entry in file.entries:
                for name, shape in entry.hf_tensors:
                    advance(_write_tensor(source, stream, name, is_linear(entry, shape)))
    write_index(directory, [(file.name, file.specs) for file in files])
    write_companions(source, directory, blockwise_config(source))


def blockwise_config(source: Source) -> dict[str, Any]:
    """`quantization_config` of config.json, as the published FP8 checkpoints have it.

    Routers are named in full: transformers takes each name as a prefix, so that a bare "mlp.gate" would also
    leave out "mlp.gate_proj".
    """
    routers = [
        name.removesuffix(".weight")
        for entry in source.entries
        for name in entry.hf
        if name.endswith(".mlp.gate.weight")
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *routers],
    }


def write_companions(source: Source, directory: Path, quantization_config: dict[str, Any]) -> None:
    """config.json with `quantization_config`, generation config and tokenizer."""
    copy_companions(source.directory, directory, source.dtype)
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"quantization_config": quantization_config}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_tensor(source: Source, stream: SafetensorsStream, name: str, linear: bool) -> int:
    tensor = source.tensors.slice(name)[:]
    if not linear:
        # Rounding may overflow too: float16 cannot hold what float32 can. (The other way round it cannot.)
        tensor = tensor.to(source.dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise not_finite(source, name)
        stream.add(name, tensor)
        return tensor.nbytes
    try:
        values, scales = quantize_blockwise(tensor)
    except ValueError as error:
        raise not_finite(source, name) from error
    stream.add(name, values)
    stream.add(name + SCALE_SUFFIX, scales)
    return values.nbytes + scales.nbytes


def not_finite(source: Source, name: str) -> UserError:
    """The error for a tensor with NaN or infinity."""
    return UserError(f"{name} in {source.tensors.file(name)} holds NaN or infinity")


def total_bytes(directory: Path) -> int:
    """Size of the weight files in a directory."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def bf16_bytes(source: Source) -> int:
    """Size of the source's weights in bfloat16, which FP8 is compared with."""
    return 2 * sum(math.prod(shape) for entry in source.entries for shape in entry.layout.hf_shapes)
