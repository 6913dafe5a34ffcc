"""FP8 products in plain torch: the rounding, the gradients, and the known size of the errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_stare.quant.blockwise import dequantize_blockwise, quantize_blockwise
from megatron_stare.quant.emulation import E4M3, E5M2, RECIPES, EmulatedLinear, emulate, round_fp8


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_rounding_by_blocks_is_what_the_export_stores():
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        round_fp8(x, (128, 128), E4M3, power_of_two=False), dequantize_blockwise(*quantize_blockwise(x))
    )


def test_powers_of_two_lose_nothing_of_numbers_that_fp8_holds():
    x = torch.tensor([[448.0, 1.0, -0.875, 0.0], [2.0**-20, 2.0**-19, 0.0, 0.0]])
    assert torch.equal(round_fp8(x, (1, 4), E4M3, power_of_two=True), x)


@pytest.mark.parametrize(("dtype", "bound"), [(E4M3, 2**-4), (E5M2, 2**-3)])
def test_rounding_moves_a_number_by_at_most_half_a_step(dtype, bound):
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) + 0.5
    error = (round_fp8(x, (1, 32), dtype, power_of_two=True) - x).abs() / x
    assert 0 < error.max() <= bound


def test_a_block_of_zeros_stays_zero():
    assert torch.equal(round_fp8(torch.zeros(3, 5), (1, 4), E4M3, power_of_two=True), torch.zeros(3, 5))


def test_an_outlier_spoils_its_block_only():
    x = torch.full((1, 256), 0.001)
    x[0, 0] = 1e6
    assert round_fp8(x, None, E4M3, power_of_two=False)[0, 1:].eq(0).all()
    assert torch.allclose(round_fp8(x, (1, 128), E4M3, power_of_two=True)[0, 128:], x[0, 128:], rtol=2**-4)


# Relative errors of output and gradients for normal inputs: about sqrt(2) times FP8's own rounding.
@pytest.mark.parametrize(
    ("name", "forward", "backward"), [("tensorwise", 0.037, 0.059), ("blockwise", 0.0375, 0.0375)]
)
def test_errors_are_as_large_as_the_formats_make_them(name, forward, backward):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 384, generator=generator, requires_grad=True)
    exact = nn.Linear(384, 256, bias=False)
    emulated = EmulatedLinear(exact, RECIPES[name])
    upstream = torch.randn(512, 256, generator=generator)
    results = []
    for layer in (exact, emulated):
        x.grad = exact.weight.grad = None
        output = layer(x)
        output.backward(upstream)
        results.append((output.detach(), x.grad.clone(), exact.weight.grad.clone()))
    errors = [relative(ours, reference) for reference, ours in zip(*results, strict=True)]
    assert errors == pytest.approx([forward, backward, backward], rel=0.1)


def test_layers_at_either_end_are_kept():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5))
    emulate(layers, RECIPES["mxfp8"], keep_ends=1)
    assert [isinstance(layer[0], EmulatedLinear) for layer in layers] == [False, True, True, True, False]


def test_bias_and_leading_dimensions_are_kept():
    linear = nn.Linear(64, 32)
    x = torch.randn(2, 3, 64)
    assert torch.allclose(EmulatedLinear(linear, RECIPES["mxfp8"])(x), linear(x), atol=0.1)
    assert EmulatedLinear(linear, RECIPES["mxfp8"])(x).shape == (2, 3, 32)
