"""Per-tensor FP8 by NVIDIA ModelOpt: static scales for weights and, from calibration, for activations."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_stare.errors import UserError
from megatron_stare.quant.source import Source
from megatron_stare.quant.write import not_finite, write_companions


def modelopt_bytes(source: Source) -> int:
    """Size of the weights that `write_modelopt` writes, with room for its scalars."""
    linear, other = source.elements
    return linear + 2 * other + 1024 * len(source.entries)


def require_modelopt() -> None:
    """Raise UserError when nvidia-modelopt is not installed."""
    from importlib.util import find_spec

    if find_spec("modelopt") is None:
        raise UserError("--quant fp8 needs nvidia-modelopt (pip install nvidia-modelopt)")


def write_modelopt(
    source: Source, directory: Path, samples: Sequence[Sequence[int]], advance: Callable[[int], None]
) -> None:
    """Quantise with ModelOpt's FP8_DEFAULT_CFG and write its Hugging Face layout. The model is in memory.

    Args:
        directory: an existing one.
        samples: token ids to calibrate on.
        advance: called with the number of samples that were run since.

    Raises:
        UserError: a weight, or an activation of a sample, is NaN or infinite.
    """
    _check_finite(source)
    with _quiet() as said, _without_megatron():
        try:
            _quantise(source, directory, samples, advance)
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"ModelOpt said before:\n{said.getvalue()[-2000:]}")
            raise
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    write_companions(source, directory, config["quantization_config"])


def _quantise(
    source: Source, directory: Path, samples: Sequence[Sequence[int]], advance: Callable[[int], None]
) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.directory, dtype=source.dtype, local_files_only=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).eval()

    def calibrate(model: Any) -> None:
        for ids in samples:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits
            if not bool(torch.isfinite(logits).all()):
                raise UserError(f"{source.directory}: the model computes NaN or infinity on a sample")
            advance(1)

    mtq.quantize(model, mtq.FP8_DEFAULT_CFG, calibrate)
    export_hf_checkpoint(model, export_dir=directory)


def _check_finite(source: Source) -> None:
    for name in source.tensors:
        if not bool(torch.isfinite(source.tensors.slice(name)[...].to(source.dtype)).all()):
            raise not_finite(source, name)


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    """Keep what ModelOpt and transformers print off the console; errors raise all the same."""
    from transformers.utils import logging

    said, verbosity = io.StringIO(), logging.get_verbosity()
    logging.set_verbosity_error()  # its handler holds the stderr of its import
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield said
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _without_megatron() -> Iterator[None]:
    """ModelOpt imports Megatron where it is installed, and patches it: slow, noisy, and not needed here.

    Calibration tries it again: to be in force until the export is done.
    """
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    for name in hidden:
        del sys.modules[name]
    sys.modules["megatron"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["megatron"]
        sys.modules.update(hidden)
