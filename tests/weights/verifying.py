"""What the rank of the verification test does."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import megatron_stare.engine  # noqa: F401  prepares the device before Megatron is imported

# isort: split
from megatron_stare.engine.verify import verify_conversion
from megatron_stare.errors import UserError
from megatron_stare.weights.convert import plan_conversion


def verify_all(hf: str, megatron: str, directory: str) -> dict[str, str]:
    """Convert with verification, right and wrong; what verification said of each."""
    out = Path(directory)
    broken = out / "broken"
    shutil.copytree(hf, broken)
    _edit(broken, lambda tensor: tensor.fill_(float("nan")))
    found = {
        "to_megatron": _convert(hf, out / "to_megatron"),
        "to_hf_rounded": _convert(megatron, out / "to_hf_rounded", dtype=torch.bfloat16),
        "tampered": _convert(megatron, out / "tampered", damage=lambda tensor: tensor.mul_(1.01)),
        "not_a_number": _convert(str(broken), out / "not_a_number"),
    }
    shutil.rmtree(broken)
    return found


def _convert(source: str, target: Path, damage=None, **options) -> str:
    said = []
    conversion = plan_conversion(source, target, workers=1, **options)

    def check(stage: Path) -> None:
        if damage is not None:
            _edit(stage, damage)
        said.append(verify_conversion(conversion, stage))

    try:
        conversion.run(check=check)
    except UserError as error:
        said.append(str(error))
    return said[0]


def _edit(directory: Path, change) -> None:
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name == "model.layers.0.mlp.down_proj.weight":
                change(tensors[name])
        save_file(tensors, file, metadata={"format": "pt"})
