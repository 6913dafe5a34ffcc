"""FP8 matrix products in plain torch: what each recipe rounds, where, and with which scales.

Transformer Engine's recipes for training, as far as numbers go: both inputs of each of a linear layer's three
products (output, gradient of the input, gradient of the weight) are rounded to FP8 and multiplied with
high-precision accumulation. Runs on a CPU, where no FP8 product exists; nothing is faster for it.

| recipe | one scale for | scale | output's inputs | gradients |
| --- | --- | --- | --- | --- |
| tensorwise | the tensor | largest magnitude / format's largest | E4M3 | E5M2 |
| blockwise | 128 along the product's inner dimension; weights 128 x 128 | a power of two | E4M3 | E4M3 |
| mxfp8 | 32 along the inner dimension | a power of two | E4M3 | E4M3 |

`delayed` is tensorwise with the largest magnitude of earlier steps, so it needs a history and is not here.
Sources: NVIDIA Transformer Engine's recipes (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling);
block scaling: DeepSeek-V3, arXiv 2412.19437, section 3.3; MXFP8: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Recipe:
    """How tensors are rounded.

    Attributes:
        block: elements along the inner dimension that share a scale; None: the tensor has one.
        weight_block: rows that share it too, of weights.
        gradient: the FP8 format of output gradients; everything else is E4M3.
        power_of_two: are scales rounded up to a power of two?
    """

    block: int | None
    weight_block: int = 1
    gradient: torch.dtype = E4M3
    power_of_two: bool = True


RECIPES = {
    "tensorwise": Recipe(None, gradient=E5M2, power_of_two=False),
    "blockwise": Recipe(128, weight_block=128),
    "mxfp8": Recipe(32),
}


def round_fp8(x: Tensor, block: tuple[int, int] | None, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """What is left of a float32 matrix [rows, columns] after FP8, scaled by `block` (None: by the tensor).

    Blocks at the edges hold what is left of the matrix.
    """
    rows, columns = x.shape
    down, across = block or (rows, columns)
    padded = F.pad(x, (0, -columns % across, 0, -rows % down))
    tiles = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // across, across)
    limit = torch.finfo(dtype).max
    scale = tiles.abs().amax(dim=(1, 3), keepdim=True) / limit
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scale = torch.where(scale > 0, scale, 1.0)
    rounded = (tiles / scale).clamp(-limit, limit).to(dtype).float() * scale
    return rounded.reshape(padded.shape)[:rows, :columns]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI: Tensor, weight_OI: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.recipe = recipe
        return _rounded(x_TI, recipe) @ _rounded(weight_OI, recipe, weight=True).t()

    @staticmethod
    def backward(ctx, grad_TO: Tensor):
        x_TI, weight_OI = ctx.saved_tensors
        recipe, kind = ctx.recipe, ctx.recipe.gradient
        # Each product's inputs are scaled along its own inner dimension: O, then T.
        weight_IO = _rounded(weight_OI.t(), recipe, weight=True)
        grad_x_TI = _rounded(grad_TO, recipe, kind) @ weight_IO.t()
        grad_weight_OI = _rounded(grad_TO.t(), recipe, kind) @ _rounded(x_TI.t(), recipe).t()
        return grad_x_TI, grad_weight_OI, None


def _rounded(x: Tensor, recipe: Recipe, dtype: torch.dtype = E4M3, *, weight: bool = False) -> Tensor:
    block = None if recipe.block is None else (recipe.weight_block if weight else 1, recipe.block)
    return round_fp8(x, block, dtype, recipe.power_of_two)


class EmulatedLinear(nn.Module):
    """A linear layer whose three products take FP8 inputs; its weight and bias stay as they are."""

    def __init__(self, linear: nn.Linear, recipe: Recipe) -> None:
        super().__init__()
        self.weight, self.bias, self.recipe = linear.weight, linear.bias, recipe

    def forward(self, x: Tensor) -> Tensor:
        """As the linear layer; x: [..., inputs]."""
        flat = _Linear.apply(x.flatten(0, -2).float(), self.weight.float(), self.recipe).to(x.dtype)
        result = flat.unflatten(0, x.shape[:-1])
        return result if self.bias is None else result + self.bias


def emulate(layers: nn.ModuleList, recipe: Recipe, *, keep_ends: int = 0) -> None:
    """Replace every linear layer of a transformer's layers, but for `keep_ends` layers at either end.

    In place. Embeddings and the output layer are not among the layers: no recipe touches them.
    """
    for layer in layers[keep_ends : len(layers) - keep_ends]:
        for module in list(layer.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    setattr(module, name, EmulatedLinear(child, recipe))
