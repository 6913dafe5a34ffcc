"""The machine that a plan is for, and how much of its peak figures is assumed to be reached.

All of it is assumption: published peak figures of an H100 SXM, and shares of them that well-tuned runs reach.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_stare.errors import UserError

_UNITS = {"GB": 10**9, "GIB": 2**30, "MB": 10**6, "MIB": 2**20, "": 10**9}


@dataclass(frozen=True)
class Hardware:
    """Bytes, FLOP/s and bytes/s of one GPU, and the assumed efficiencies (shares from 0 to 1).

    `nvlink` and `network` are per GPU and direction. `reserve` is what CUDA's context, NCCL's buffers,
    cuBLAS's workspace and the allocator's gaps take: no tensor accounts for it.
    """

    memory: int = 80 * 10**9
    reserve: int = 4 * 10**9
    flops: float = 989e12
    hbm: float = 3.35e12
    nvlink: float = 450e9
    network: float = 50e9
    gpus_per_node: int = 8
    train_efficiency: float = 0.40
    decode_efficiency: float = 0.50
    link_efficiency: float = 0.70
    overlap: float = 0.50

    def assumptions(self) -> list[str]:
        """One line for each figure that a measurement would have to replace."""
        return [
            f"GPU: {self.memory / 1e9:g} GB, of which {self.reserve / 1e9:g} GB are kept free for CUDA, "
            "NCCL, cuBLAS and the allocator's gaps (--memory, --reserve)",
            f"GPU: {self.flops / 1e12:g} TFLOP/s bf16 (--flops), HBM {self.hbm / 1e12:g} TB/s (--hbm), "
            f"NVLink {self.nvlink / 1e9:g} GB/s (--nvlink), network {self.network / 1e9:g} GB/s a GPU and "
            f"direction (--network), {self.gpus_per_node} GPUs a node (--gpus-per-node)",
            f"matrix products reach {self.train_efficiency:.0%} of the peak in training "
            f"(--train-efficiency), decoding {self.decode_efficiency:.0%} of HBM's bandwidth "
            f"(--decode-efficiency), collectives {self.link_efficiency:.0%} of the links' "
            "(--link-efficiency)",
            f"with parallel.overlap, {self.overlap:.0%} of the gradients' reduction hides behind the "
            "backward pass; no other communication hides behind anything (--overlap)",
        ]


def parse_bytes(text: str) -> int:
    """`80GB`, `79.6GiB`, `512MB` or `80` (GB) in bytes. Raises UserError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GM]I?B)?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise UserError(f"{text!r} is not a size: write 80GB, 79.6GiB or 512MB")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])
