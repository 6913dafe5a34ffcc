"""Whether an FP8 checkpoint is what its source was, but for rounding: tensor by tensor, and in log-probs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_stare.errors import UserError
from megatron_stare.quant.read import Fp8Checkpoint, load_emulated
from megatron_stare.quant.source import Source
from megatron_stare.weights.reference import log_probs, no_progress_bar

# float8_e4m3fn keeps 3 bits of the mantissa: rounding moves a value by at most 2^-4 of it, or by half the
# smallest subnormal, 2^-10. ModelOpt divides in bfloat16, which rounds (by 2^-9) before.
_RELATIVE = 2**-4 + 2**-8
_ABSOLUTE = 2**-10 + 2**-14


@dataclass(frozen=True)
class Difference:
    """How far the log-probs of the same tokens lie apart.

    Attributes:
        tokens: how many were compared.
        largest, mean: absolute difference, in nats.
        source_mean, export_mean: mean log-prob a token.
    """

    tokens: int
    largest: float
    mean: float
    source_mean: float
    export_mean: float


def check_tensors(
    source: Source, directory: Path, advance: Callable[[int], None] = lambda done: None
) -> None:
    """Compare every stored tensor with its source: as far off as FP8 rounding can bring it, and no further.

    Raises:
        UserError: names the first tensor that is not, and see `Fp8Checkpoint`.
    """
    checkpoint = Fp8Checkpoint(directory)
    for entry in checkpoint.entries:
        for index, name in enumerate(entry.hf):
            stored, scale = checkpoint.weight(entry, index)
            original = source.tensors.slice(name)[...]
            if scale is None:
                wrong = stored != original.to(source.dtype).float()  # also where one of them is NaN
            else:
                # ModelOpt quantises what the model was loaded in, which may have been rounded to that.
                original = (original if checkpoint.blockwise else original.to(source.dtype)).float()
                wrong = ~((stored - original).abs() <= original.abs() * _RELATIVE + scale * _ABSOLUTE)
            if bool(wrong.any()):
                raise UserError(
                    f"the exported {name} is not its source rounded to FP8: {int(wrong.sum())} of "
                    f"{wrong.numel()} values are off"
                )
            advance(1)


def compare(
    source: Source,
    directory: Path,
    texts: Sequence[Sequence[int]],
    advance: Callable[[int], None] = lambda done: None,
) -> Difference:
    """Log-probs of the export, as SGLang's kernels round, against the source's in float32.

    One model is in memory at a time, in float32.

    Args:
        texts: token ids; the log-prob of every token but the first is compared.
        advance: called with the texts that were run since: each once a model.

    Raises:
        UserError: the source computes NaN; see also `Fp8Checkpoint`.
    """
    before = _log_probs(lambda: _load_source(source), texts, advance)
    if not bool(torch.isfinite(before).all()):
        raise UserError(f"{source.directory}: the model's own log-probs are not finite")
    after = _log_probs(lambda: load_emulated(directory), texts, advance)
    gap = (before - after).abs()
    return Difference(
        tokens=len(gap),
        largest=float(gap.max()),
        mean=float(gap.mean()),
        source_mean=float(before.mean()),
        export_mean=float(after.mean()),
    )


def _load_source(source: Source) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32, local_files_only=True)


def _log_probs(
    load: Callable[[], Any], texts: Sequence[Sequence[int]], advance: Callable[[int], None]
) -> Tensor:
    """Log-probs of all tokens but the first of each text, one after another, float32."""
    with no_progress_bar():
        model = load().eval()
    found = []
    for ids in texts:
        found.append(log_probs(model, ids))
        advance(1)
    del model
    gc.collect()  # the hooks and the model refer to each other
    return torch.cat(found)
