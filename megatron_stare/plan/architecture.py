"""The architecture that a plan is for: of a directory, or of the shipped config.json of a published model."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from megatron_stare.errors import UserError
from megatron_stare.weights.hf_config import HFConfig, parse_hf_config, read_hf_config
from megatron_stare.weights.mapping import model_entries

_SHIPPED = Path(__file__).with_name("models")


@dataclass(frozen=True)
class Architecture:
    """A model's shape and where it was read (`source`, a sentence part)."""

    hf: HFConfig
    source: str

    @property
    def parameters(self) -> int:
        """Parameters of the Hugging Face checkpoint; tied embeddings count once."""
        return count_parameters(self.hf)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: chosen experts only, and no embedding lookup."""
        hf = self.hf
        total = self.parameters - (0 if hf.tied_embeddings else hf.vocab_size * hf.hidden_size)
        if not hf.num_experts:
            return total
        expert = 3 * hf.hidden_size * hf.expert_ffn_size
        return total - hf.num_layers * (hf.num_experts - hf.experts_per_token) * expert


def count_parameters(hf: HFConfig) -> int:
    """Parameters of the Hugging Face checkpoint, by the family's table; tied embeddings count once."""
    return sum(
        math.prod(shape) for entry in model_entries(hf) if not entry.copy for _, shape in entry.hf_tensors
    )


def shipped_models() -> list[str]:
    """Names of the published models whose architecture is shipped."""
    return sorted(file.stem for file in _SHIPPED.glob("*.json"))


def find_architecture(model_path: str, chosen: str | None = None) -> Architecture:
    """The architecture of `chosen` (a shipped name or a directory), else of `model_path`.

    Where `model_path` is no directory here, the shipped model of its last part's name stands in for it.
    Raises UserError when neither exists, or the directory holds no supported model.
    """
    wanted = chosen or model_path
    if Path(wanted).is_dir():
        return Architecture(read_hf_config(wanted), f"{wanted}/config.json")
    file = _SHIPPED / f"{Path(wanted).name}.json"
    if not file.is_file():
        key = "--model" if chosen else "model.path"
        raise UserError(
            f"{key}={wanted}: is not a directory here, and no shipped architecture has that name; shipped: "
            f"{', '.join(shipped_models())} (choose one, or a directory with config.json, by --model)"
        )
    hf = parse_hf_config(json.loads(file.read_text(encoding="utf-8")), file)
    missing = "" if chosen else f"{wanted} does not exist here: "
    return Architecture(hf, f"{missing}the shipped architecture of {file.stem}")
