"""Block-wise FP8: the same numbers as a plain loop over blocks, and errors within what FP8 can bring."""

from __future__ import annotations

import pytest
import torch

from megatron_stare.quant import blockwise, dequantize_blockwise, quantize_blockwise
from megatron_stare.quant.blockwise import BLOCK, FP8

SHAPES = [(128, 128), (256, 384), (1, 1), (127, 129), (300, 64), (5, 1000), (576, 192)]


def reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, block by block."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=FP8)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            block = weight[place].float()
            largest = block.abs().max()
            scale = largest / 448 if largest > 0 else torch.tensor(1.0)
            values[place] = (block / scale).clamp(-448, 448).to(FP8)
            scales[i, j] = scale
    return values, scales


def random_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Magnitudes over many powers of ten, so that blocks have subnormals and scales differ."""
    generator = torch.Generator().manual_seed(sum(shape))
    size = torch.randn(shape, generator=generator) * 2
    return (torch.randn(shape, generator=generator) * size.exp() * 0.02).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_a_loop_over_blocks_to_the_bit(shape, dtype):
    weight = random_weight(shape, dtype)
    before = weight.clone()
    values, scales = quantize_blockwise(weight)
    wanted, wanted_scales = reference(weight)
    assert torch.equal(bits(values), bits(wanted))
    assert torch.equal(scales, wanted_scales) and scales.dtype == torch.float32
    assert torch.equal(weight, before)


@pytest.mark.parametrize("rows_at_a_time", [1, 2])
def test_equal_when_cut_into_chunks(monkeypatch, rows_at_a_time):
    weight = random_weight((700, 300))
    whole = quantize_blockwise(weight)
    back = dequantize_blockwise(*whole)
    monkeypatch.setattr(blockwise, "_CHUNK_ELEMENTS", rows_at_a_time * BLOCK * 300)
    values, scales = quantize_blockwise(weight)
    assert torch.equal(bits(values), bits(whole[0])) and torch.equal(scales, whole[1])
    assert torch.equal(dequantize_blockwise(values, scales), back)


@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip_is_within_half_a_step(shape):
    weight = random_weight(shape)
    values, scales = quantize_blockwise(weight)
    back = dequantize_blockwise(values, scales)
    spread = scales.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
    # 3 bits of the mantissa, or half the smallest subnormal; the product is rounded to float32 besides
    bound = torch.maximum(weight.abs() * 2**-4, spread * 2**-10) * (1 + 1e-6)
    assert bool(((back - weight).abs() <= bound).all())
    assert bool(((values.float() * spread) == back).all())


def test_the_largest_value_of_a_block_is_kept():
    weight = random_weight((256, 256))
    back = dequantize_blockwise(*quantize_blockwise(weight))
    blocks, original = (t.unflatten(0, (2, -1)).unflatten(2, (2, -1)) for t in (back, weight))
    largest = original.abs().amax((1, 3))
    assert torch.allclose(blocks.abs().amax((1, 3)), largest, rtol=1e-6)


def test_zero_and_vanishing_blocks():
    weight = torch.zeros(256, 130)
    weight[128:, :128] = 1e-45  # the quotient by 448 underflows to zero
    values, scales = quantize_blockwise(weight)
    assert torch.equal(scales, torch.ones(2, 2))
    assert torch.equal(dequantize_blockwise(values, scales), torch.zeros(256, 130))


def test_a_second_round_changes_nothing():
    once = dequantize_blockwise(*quantize_blockwise(random_weight((256, 200))))
    twice = dequantize_blockwise(*quantize_blockwise(once))
    assert torch.allclose(once, twice, rtol=1e-6, atol=0)


def test_bfloat16_comes_back_rounded_once():
    values, scales = quantize_blockwise(random_weight((128, 256)))
    exact = dequantize_blockwise(values, scales)
    assert torch.equal(dequantize_blockwise(values, scales, torch.bfloat16), exact.bfloat16())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused(bad):
    weight = random_weight((200, 200))
    weight[150, 190] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize_blockwise(weight)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="matrix"):
        quantize_blockwise(torch.zeros(3))
    with pytest.raises(ValueError, match="do not fit"):
        dequantize_blockwise(torch.zeros(200, 128, dtype=FP8), torch.ones(1, 1))
