"""The model card of an FP8 export."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from megatron_stare.quant.calibration import MAX_TOKENS, Calibration
from megatron_stare.quant.check import Difference
from megatron_stare.quant.source import Source

_METHODS = {
    "fp8": "NVIDIA ModelOpt {modelopt}, FP8_DEFAULT_CFG: float8_e4m3fn, one scale a linear for its weight "
    "(`weight_scale`) and one, from calibration, for its input (`input_scale`)",
    "fp8_blockwise": "float8_e4m3fn in blocks of 128 x 128, each with a float32 scale (`weight_scale_inv`); "
    "activations are rounded when they are computed, in groups of 128",
}


def model_card(
    source: Source,
    quant: str,
    calibration: Calibration | None,
    nbytes: int,
    bf16_bytes: int,
    difference: Difference | None,
    serving: str,
) -> str:
    """README.md: what the checkpoint was made from and how, its size, how far off it is. No date, no path."""
    dtype = str(source.dtype).removeprefix("torch.")
    lines = [
        f"# {source.directory.resolve().name}, {quant}",
        "",
        f"- Source: {source.directory.resolve().name} ({source.config.architecture})",
        f"- Method: {_METHODS[quant].format(modelopt=_modelopt())}",
        f"- Not quantised, in {dtype}: embeddings, output head, norms, biases, routers",
    ]
    if quant == "fp8" and calibration is not None:
        lines.append(
            f"- Calibration: {len(calibration.samples)} rows of {calibration.name}, "
            f"at most {MAX_TOKENS} tokens each"
        )
    lines.append(
        f"- Size of the weights: {nbytes / 1e6:.1f} MB, {nbytes / bf16_bytes:.3f} of bfloat16's "
        f"{bf16_bytes / 1e6:.1f} MB"
    )
    if difference is None:
        lines.append("- Difference from the source: not checked")
    else:
        lines += [
            f"- Log-probs against the source's, over {difference.tokens} tokens, FP8 arithmetic emulated in "
            f"float32: mean difference {difference.mean:.4g} nats, largest {difference.largest:.4g}",
            f"- Mean log-prob a token: {difference.source_mean:.4f}, then {difference.export_mean:.4f}",
        ]
    if serving:
        lines.append(f"- Serving: {serving}")
    return "\n".join(lines) + "\n"


def _modelopt() -> str:
    try:
        return version("nvidia-modelopt")
    except PackageNotFoundError:
        return "(version unknown)"
