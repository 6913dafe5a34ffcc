"""Stand-in for the `sgl_kernel` wheel on CPUs: the functions SGLang's CPU path calls, in plain torch.

Everything else has a name (SGLang imports many) and raises NotImplementedError when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots, packed in `out_cache_loc`, into its row of `req_to_token`."""
    position = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        slots = out_cache_loc[position : position + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        position += end - start


_LOW32 = 0xFFFFFFFF


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _LOW32


def _mix(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = _rotate_left((key * 0xCC9E2D51) & _LOW32, 15)
    state = _rotate_left(state ^ ((key * 0x1B873593) & _LOW32), 13)
    return (state * 5 + 0xE6546B64) & _LOW32


def _murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of (seed low, seed high, position, column) a row and column, as SGLang's triton kernel.

    In int64: the low 32 bits of products that wrap are exact.
    """
    seed64 = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros((seed64.shape[0], 1), dtype=torch.int64)
    state = _mix(state, (seed64 & _LOW32)[:, None])
    state = _mix(state, ((seed64 >> 32) & _LOW32)[:, None])
    state = _mix(state, (positions.to(torch.int64) & _LOW32)[:, None])
    state = _mix(state, (columns.to(torch.int64) & _LOW32)[None, :])
    state = state ^ 16  # bytes hashed
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _LOW32
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _LOW32
    return (state ^ (state >> 16)).to(torch.uint32)


# A fragment: sgl_kernel's own library, where it exists, is never replaced (see standins.py).
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    missing.__name__ = name
    return missing
