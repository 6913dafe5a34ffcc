"""An FP8 checkpoint read back from its directory, and computed with as SGLang's kernels round.

Both layouts: block-wise (`quant_method: fp8`; activations get a scale per token and 128 values when they are
computed) and ModelOpt's (`quant_method: modelopt`; one static scale a linear, for weights and activations).
Everything is computed in float32 on values rounded to FP8; kernels that add up in another order differ in the
last bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_stare.errors import UserError
from megatron_stare.quant.blockwise import BLOCK, FP8, FP8_MAX, SCALE_SUFFIX, dequantize_blockwise
from megatron_stare.quant.source import is_linear
from megatron_stare.weights.hf_config import parse_hf_config
from megatron_stare.weights.layouts import GateUp
from megatron_stare.weights.mapping import Entry, model_entries
from megatron_stare.weights.source import CheckpointSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rounding = Callable[[Tensor], Tensor]


class Fp8Checkpoint:
    """The tensors of an FP8 checkpoint.

    Attributes:
        blockwise: the layout is the block-wise one, not ModelOpt's.

    Raises:
        UserError: no such checkpoint, another kind of quantisation, or a tensor is missing, of another shape
            or dtype than its layout has, or a scale is not a positive number.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        file = self.directory / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            quantisation = raw.pop("quantization_config")
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{file} describes no quantised checkpoint: {error!r}") from error
        self.blockwise = _is_blockwise(quantisation, file)
        self.config = parse_hf_config(raw, file)
        self.source = CheckpointSource(self.directory)
        self.entries = [entry for entry in model_entries(self.config) if not entry.copy]
        self._check()

    def scale_names(self, weight: str) -> tuple[str, ...]:
        """The tensors that belong to a linear's weight."""
        if self.blockwise:
            return (weight + SCALE_SUFFIX,)
        module = weight.removesuffix(".weight")
        return f"{module}.weight_scale", f"{module}.input_scale"

    def read(self, name: str) -> Tensor:
        """A stored tensor."""
        return self.source.slice(name)[...]

    def weight(self, entry: Entry, index: int) -> tuple[Tensor, Tensor | None]:
        """Tensor number `index` of an entry in float32, and the scale of each element (None: not quantised).

        The scales broadcast with the tensor.
        """
        name, shape = entry.hf_tensors[index]
        stored = self.read(name)
        if not is_linear(entry, shape):
            return stored.float(), None
        scale = self.read(self.scale_names(name)[0]).float()
        if not self.blockwise:
            return stored.float() * scale, scale
        spread = scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
        return dequantize_blockwise(stored, scale), spread

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in float32, as SGLang computes with them.

        Linears that it fuses into one get one scale from ModelOpt's: the largest, to which the others are
        rounded again (`requantize_with_max_scale`).
        """
        for entry in self.entries:
            tensors = [self.weight(entry, i) for i in range(len(entry.hf))]
            scales = [scale for _, scale in tensors if scale is not None]
            for name, (tensor, scale) in zip(entry.hf, tensors, strict=True):
                if scale is not None and not self.blockwise:
                    largest = torch.stack(scales).max()
                    tensor = tensor if scale == largest else static_rounding(largest)(tensor)
                yield name, tensor

    def activation_rounding(self) -> dict[str, Rounding]:
        """How the input of each linear is rounded, by the module's name.

        Experts are named "….experts.gate_up_proj" and "….experts.down_proj", one for all experts of a layer:
        SGLang takes the largest static scale among them, as it does among linears that it fuses.
        """
        groups: dict[str, list[str]] = {}
        for entry in self.entries:
            for name, shape in entry.hf_tensors:
                if is_linear(entry, shape):
                    module = name.removesuffix(".weight")
                    groups.setdefault(self._shared(entry, module), []).append(module)
        found = {}
        for shared, modules in groups.items():
            rounding = dynamic_rounding if self.blockwise else static_rounding(self._input_scale(modules))
            found |= dict.fromkeys([shared, *modules], rounding)
        return found

    @staticmethod
    def _shared(entry: Entry, module: str) -> str:
        if not entry.is_expert:
            return entry.names[0]  # a Megatron name, which is no module's
        kind = "gate_up_proj" if isinstance(entry.layout, GateUp) else "down_proj"
        return f"{module.rpartition('.experts.')[0]}.experts.{kind}"

    def _input_scale(self, modules: list[str]) -> Tensor:
        return torch.stack([self.read(f"{m}.input_scale").float().reshape(()) for m in modules]).max()

    def _check(self) -> None:
        for entry in self.entries:
            for name, shape in entry.hf_tensors:
                linear = is_linear(entry, shape)
                self._check_tensor(name, shape, ("F8_E4M3",) if linear else ("BF16", "F16", "F32"))
                for scale in self.scale_names(name) if linear else ():
                    self._check_scale(scale, shape)

    def _check_scale(self, name: str, shape: tuple[int, ...]) -> None:
        wanted = tuple(-(-size // BLOCK) for size in shape) if self.blockwise else ()
        self._check_tensor(name, wanted, ("F32", "BF16"))
        values = self.read(name).float()
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            raise UserError(f"{name} in {self.source.file(name)} has a scale that is not a positive number")

    def _check_tensor(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        if name not in self.source:
            raise UserError(f"{self.directory} lacks {name}")
        stored = self.source.slice(name)
        found = tuple(stored.get_shape()), stored.get_dtype()
        if found[0] != shape or found[1] not in dtypes:
            raise UserError(
                f"{name} in {self.source.file(name)} is {found[1]} {list(found[0])}; "
                f"{' or '.join(dtypes)} {list(shape)} belongs there"
            )


def load_emulated(directory: str | Path) -> PreTrainedModel:
    """A transformers model in float32 that computes as the FP8 checkpoint does when SGLang serves it.

    Raises:
        UserError: see `Fp8Checkpoint`.
    """
    import transformers

    checkpoint = Fp8Checkpoint(directory)
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    del config.quantization_config
    model = getattr(transformers, checkpoint.config.architecture).from_pretrained(
        None, config=config, state_dict=dict(checkpoint.served_weights()), dtype=torch.float32
    )
    rounding = checkpoint.activation_rounding()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name in rounding:
            module.register_forward_pre_hook(partial(_round_input, rounding[name]))
        elif f"{name}.gate_up_proj" in rounding:
            both = rounding[f"{name}.gate_up_proj"], rounding[f"{name}.down_proj"]
            module.forward = partial(_experts, module, *both)
    return model.eval()


def dynamic_rounding(x: Tensor) -> Tensor:
    """Round to FP8 in groups of 128 along the last dimension, each with the scale that its values need."""
    width = x.shape[-1]
    groups = nn.functional.pad(x, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / FP8_MAX  # SGLang's smallest
    return _round(groups, scale).flatten(-2)[..., :width]


def static_rounding(scale: Tensor) -> Rounding:
    """Rounding to FP8 with a scale that is known beforehand; what exceeds it is cut off."""
    return partial(_round, scale=scale)


def _round(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale


def _round_input(rounding: Rounding, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return rounding(inputs[0]), *inputs[1:]


def _experts(
    module: Any, into: Rounding, between: Rounding, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """transformers' mixture of experts, with rounded inputs.

    hidden [T, H]; chosen [T, K] expert of each token; weights [T, K].
    """
    out = torch.zeros_like(hidden)
    rounded = into(hidden)
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        gate, up = nn.functional.linear(rounded[token], module.gate_up_proj[expert]).chunk(2, dim=-1)
        inner = between(module.act_fn(gate) * up)
        value = nn.functional.linear(inner, module.down_proj[expert]) * weights[token, place, None]
        out.index_add_(0, token, value)
    return out


def _is_blockwise(quantisation: dict[str, Any], file: Path) -> bool:
    method = quantisation.get("quant_method")
    if method == "fp8" and quantisation.get("weight_block_size") == [BLOCK, BLOCK]:
        return True
    if method == "modelopt" and quantisation.get("quant_algo") == "FP8":
        return False
    raise UserError(
        f"{file}: quantisation {method!r} (algorithm {quantisation.get('quant_algo')!r}, blocks "
        f"{quantisation.get('weight_block_size')}) is neither block-wise FP8 in 128 x 128 nor ModelOpt's FP8"
    )
