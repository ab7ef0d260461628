"""The fastest plain read of a tensor that is simple to write: a block sums its tile and stores one
number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 8192


@triton.jit
def _sum_tiles(x, out, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + at, mask=at < n, other=0.0)))


def plain_read(x: torch.Tensor) -> torch.Tensor:
    """x: float32, contiguous. Returns the sums of its tiles."""
    tiles = -(-x.numel() // TILE)
    out = x.new_empty(tiles)
    _sum_tiles[(tiles,)](x, out, x.numel(), TILE, num_warps=8)
    return out
