"""FP8 on the wire: weights on their way to servers that hold a block-wise FP8 model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from megatron_stare.quant.blockwise import SCALE_SUFFIX, quantize_blockwise
from megatron_stare.quant.source import linears
from megatron_stare.weights.hf_config import HFConfig
from megatron_stare.weights.mapping import model_entries


def fp8_weights(
    named_tensors: Iterable[tuple[str, Tensor | None]], config: HFConfig
) -> Iterator[tuple[str, Tensor | None]]:
    """The same tensors in the layout of `--quant fp8_blockwise`: half the bytes of bfloat16.

    The weight of each of the layers' linears becomes two tensors, its values and its scales; everything else
    passes as it is, and so does a None, which stands for a tensor that is whole on another rank.

    Raises:
        ValueError: a weight has a value that is NaN or infinite; names it.
    """
    quantised = {name for name, _ in linears(model_entries(config))}
    for name, tensor in named_tensors:
        if tensor is None or name not in quantised:
            yield name, tensor
            continue
        try:
            values, scales = quantize_blockwise(tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        yield name, values
        yield name + SCALE_SUFFIX, scales
