"""FP8 checkpoints: written from Hugging Face directories, read back, and compared with their source."""

from megatron_stare.quant.blockwise import dequantize_blockwise, quantize_blockwise
from megatron_stare.quant.export import export_fp8

__all__ = ["dequantize_blockwise", "export_fp8", "quantize_blockwise"]
