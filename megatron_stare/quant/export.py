"""The command `export`: a Hugging Face directory in, an FP8 one out, complete and checked or not at all."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_stare.errors import UserError
from megatron_stare.quant.calibration import Calibration, built_in_texts, read_calibration
from megatron_stare.quant.card import model_card
from megatron_stare.quant.check import Difference, check_tensors, compare
from megatron_stare.quant.modelopt import modelopt_bytes, require_modelopt, write_modelopt
from megatron_stare.quant.progress import progress_bar
from megatron_stare.quant.serving import describe
from megatron_stare.quant.source import Source, open_checkpoint
from megatron_stare.quant.write import bf16_bytes, blockwise_bytes, total_bytes, write_blockwise
from megatron_stare.weights.files import free_space, refuse_existing, staged_directory

Quantisation = Literal["fp8", "fp8_blockwise"]
QUANTISATIONS: tuple[Quantisation, ...] = ("fp8", "fp8_blockwise")

DEFAULT_LIMIT = 0.5
"""Nats."""
_SPARE_BYTES = 64 << 20
"""For tokenizer, index and card."""


@dataclass(frozen=True)
class Report:
    """What was written: bytes of the weights (in bfloat16: …), seconds, and the difference if checked."""

    nbytes: int
    bf16_bytes: int
    seconds: float
    difference: Difference | None

    def summary(self, target: str | Path) -> str:
        """The lines that the command prints."""
        share = self.nbytes / self.bf16_bytes
        lines = [f"wrote {target}: {self.nbytes / 1e6:.1f} MB, {share:.3f} of bfloat16, {self.seconds:.0f} s"]
        if self.difference is None:
            lines.append("not compared with its source (--no-verify)")
        else:
            lines.append(
                f"log-probs against the source over {self.difference.tokens} tokens: mean difference "
                f"{self.difference.mean:.4f} nats, largest {self.difference.largest:.4f}"
            )
        return "\n".join(lines)


def export_fp8(
    source: str | Path,
    target: str | Path,
    quant: Quantisation,
    *,
    calibration: str | None = None,
    samples: int = 128,
    verify: bool = True,
    limit: float = DEFAULT_LIMIT,
) -> Report:
    """Quantise a checkpoint to FP8.

    Args:
        source: an unquantised Hugging Face directory.
        target: made by this function; must not exist.
        quant: "fp8" (ModelOpt, per tensor, calibrated) or "fp8_blockwise" (128 x 128 blocks).
        calibration: dataset, see `read_calibration`; "fp8" needs it, "fp8_blockwise" only compares on it.
        samples: rows to calibrate on.
        verify: read the result back and compare it with the source before it gets its name.
        limit: largest mean difference in log-probs, in nats, that is published.

    Raises:
        UserError: anything wrong with what was given, found before the work starts; or the result differs
            from its source beyond `limit` or beyond what rounding explains. Then nothing is written.
    """
    started = time.monotonic()
    _check_arguments(quant, calibration, samples, limit)
    refuse_existing(target)
    opened = open_checkpoint(source)
    expected = blockwise_bytes(opened) if quant == "fp8_blockwise" else modelopt_bytes(opened)
    check_disk(Path(target), expected)
    data = read_calibration(calibration, opened.directory, samples) if calibration is not None else None
    serving, served = describe(opened.config) if quant == "fp8_blockwise" else ("", True)
    if not served:
        print(f"warning: {serving}", file=sys.stderr)
    try:
        with staged_directory(target) as stage:
            _write(opened, stage, quant, data, expected)
            difference = _verified(opened, stage, data, limit) if verify else None
            nbytes = total_bytes(stage)
            card = model_card(opened, quant, data, nbytes, bf16_bytes(opened), difference, serving)
            (stage / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {target}: {error}") from error
    seconds = time.monotonic() - started
    return Report(nbytes, bf16_bytes(opened), seconds, difference)


def check_disk(target: Path, expected: int) -> None:
    """Raise UserError when there is no room beside `target` for that many bytes."""
    parent, free = free_space(target)
    if free < expected + _SPARE_BYTES:
        raise UserError(
            f"not enough disk space for {target}: {_gigabytes(expected + _SPARE_BYTES)} are needed, "
            f"{_gigabytes(free)} are free in {parent}"
        )


def _check_arguments(quant: str, calibration: str | None, samples: int, limit: float) -> None:
    if quant not in QUANTISATIONS:
        raise UserError(f"--quant {quant}: not known; allowed: {', '.join(QUANTISATIONS)}")
    if samples < 1:
        raise UserError(f"--samples {samples}: at least 1 is needed")
    if not limit > 0:
        raise UserError(f"--limit {limit}: must be more than 0")
    if quant == "fp8":
        if calibration is None:
            raise UserError(
                "--quant fp8 needs --calibration: prompts that the model will see, a .jsonl or .parquet file "
                "whose rows have prompt, messages or text (--quant fp8_blockwise needs none)"
            )
        require_modelopt()


def _write(
    source: Source, stage: Path, quant: Quantisation, data: Calibration | None, expected: int
) -> None:
    if quant == "fp8_blockwise":
        with progress_bar("quantising", expected, in_bytes=True) as advance:
            write_blockwise(source, stage, advance)
    else:
        assert data is not None
        with progress_bar("calibrating", len(data.samples)) as advance:
            write_modelopt(source, stage, data.samples, advance)


def _verified(source: Source, stage: Path, data: Calibration | None, limit: float) -> Difference:
    with progress_bar("comparing tensors", sum(len(entry.hf) for entry in source.entries)) as advance:
        check_tensors(source, stage, advance)
    texts = built_in_texts(source.directory, source.config.vocab_size)
    texts += [ids for ids in (data.held_out if data else []) if len(ids) > 1]
    with progress_bar("comparing log-probs", 2 * len(texts)) as advance:
        difference = compare(source, stage, texts, advance)
    if not (math.isfinite(difference.mean) and difference.mean <= limit):
        raise UserError(
            f"not published: log-probs differ from the source's by {difference.mean:.4g} nats on average "
            f"(largest {difference.largest:.4g}), and --limit is {limit:g}"
        )
    return difference


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
