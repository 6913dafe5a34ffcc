"""The layouts that the parity benchmark compares with one process, by model and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_stare.weights import write_tiny_checkpoint


@dataclass(frozen=True)
class Layout:
    """Config keys of a run over `ranks` processes; those that the sizes leave are data-parallel replicas.

    `apart`: one sequence a microbatch; with pipeline stages or expert parallelism each is padded to the
    longest. `reference`: whose numbers it must give.
    """

    name: str
    ranks: int
    changes: dict[str, Any] = field(default_factory=dict)
    model: str = "dense"
    apart: bool = False
    reference: str | None = None


_SHORT = {
    "sp": ("sequence_parallel", True),
    "distopt": ("distributed_optimizer", True),
    "overlap": ("overlap", True),
    "full": ("recompute", "full"),
    "selective": ("recompute", "selective"),
}


_BALANCED = {"parallel.expert_balance": 0.1}


def _layout(ranks: int, words: str, model: str = "dense") -> Layout:
    """From words like "tp2 sp pp2 distopt padded"."""
    changes: dict[str, Any] = {}
    for word in words.split():
        if word in _SHORT:
            key, value = _SHORT[word]
        elif word in ("padded", "balanced") or word.startswith("dp"):
            continue  # what is left
        else:
            key, value = word.rstrip("0123456789"), int(word.lstrip("abcdefghijklmnopqrstuvwxyz"))
        changes[f"parallel.{key}"] = value
    given = words.split()
    name = "_".join(given) if model == "dense" else "_".join(["moe", *given])
    if "balanced" in given:
        return Layout(name, ranks, changes | _BALANCED, model, True, "moe_one_balanced")
    return Layout(name, ranks, changes, model, "padded" in given, f"{model}_one")


REFERENCES = [
    Layout("dense_one", 1),
    Layout("moe_one", 1, model="moe"),
    # The auxiliary loss is not linear in a microbatch's tokens: both must have the same microbatches.
    Layout("moe_one_balanced", 1, _BALANCED, "moe", apart=True),
]
LAYOUTS = [
    *(
        _layout(ranks, words)
        for ranks, words in (
            (1, "full"),
            (1, "selective"),
            (1, "padded"),
            (2, "tp2"),
            (2, "tp2 sp selective"),
            (2, "pp2"),
            (2, "pp2 padded"),
            (2, "pp2 vpp2"),
            (2, "cp2"),
            (2, "dp2 overlap"),
            (2, "dp2 distopt overlap"),
            (4, "tp4"),
            (4, "pp4 full"),
            (4, "cp4"),
            (4, "tp2 sp pp2"),
            (4, "tp2 sp cp2 selective"),
            (4, "cp2 pp2 vpp2"),
            (4, "cp2 pp2 padded"),
            (4, "tp2 dp2 distopt"),
            (4, "cp2 dp2 distopt overlap full"),
            (8, "tp2 sp cp2 pp2"),
            (8, "tp2 sp pp2 vpp2 dp2 distopt"),
            (8, "tp4 sp cp2 full"),
            (8, "cp2 pp2 dp2 distopt overlap padded"),
            (8, "dp8 distopt"),
        )
    ),
    *(
        _layout(ranks, words, "moe")
        for ranks, words in (
            (2, "ep2"),
            (2, "ep2 distopt overlap"),
            (2, "ep2 tp2 sp"),
            (2, "ep2 cp2"),
            (2, "pp2"),
            (2, "ep2 cp2 balanced"),
            (4, "ep2 tp2 sp pp2 balanced"),
            (4, "ep4 full"),
            (4, "ep2 dp4 padded"),
            (4, "ep2 pp2"),
            (4, "ep2 tp2 sp dp2 distopt"),
            (4, "ep2 cp2 pp2 vpp2"),
            (8, "ep4 tp2 sp pp2 selective"),
            (8, "ep4 tp2 sp cp2 dp2 distopt overlap"),
            (8, "ep2 cp2 pp2 dp2 distopt padded"),
        )
    ),
]


def write_models(directory: Path) -> dict[str, Path]:
    """The tiny checkpoints, by name: a dense one and one with experts."""
    sizes = {"layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 8, "vocab_size": 50}
    return {
        "dense": write_tiny_checkpoint(directory / "dense", **sizes),
        "moe": write_tiny_checkpoint(directory / "moe", architecture="qwen3_moe", ffn=32, **sizes),
    }
