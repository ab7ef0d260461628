"""Grouped products in Triton: tile choice and launch."""

from __future__ import annotations

import torch

from .float8_formats import multiplies
from .grouped_gemm_kernel import grouped_product
from .moe import HOPPER_SHARED, Tiles, fitted, shared_memory

ALIGNMENT = 128


def m_grouped_gemm_contiguous(
    x: torch.Tensor,
    weight: torch.Tensor,
    m_indices: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See `radix_kernels.m_grouped_gemm_contiguous`, which has checked the arguments."""
    _launch(x, weight, x_scale, weight_scale, m_indices, out, x.shape[0], ALIGNMENT)


def m_grouped_gemm_masked(
    x: torch.Tensor,
    weight: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See `radix_kernels.m_grouped_gemm_masked`, which has checked the arguments."""
    _launch(x, weight, x_scale, weight_scale, masked_m, out, x.shape[1], expected_m)


def choose_tiles(
    rows: int, itemsize: int, shared: int = HOPPER_SHARED, widen: bool = False
) -> Tiles:
    """Tiles for groups of about so many rows.

    FP8 holds its sums twice: that of a block of 128 along K, and the whole. widen: the operands are
    FP8 that the chip does not multiply.
    """
    if itemsize == 4:
        block_m = 16 if rows <= 16 else 32
        return Tiles(block_m=block_m, block_n=32, block_k=32, group=8, num_stages=2)
    block_m = next((m for m in (16, 32, 64) if rows <= m), ALIGNMENT)
    tiles = Tiles(
        block_m=block_m,
        block_n=128,
        block_k=64 if widen else 128 // itemsize,
        group=8,
        num_warps=8 if block_m == ALIGNMENT else 4,
        num_stages=4,
    )
    return fitted(tiles, matrices=1, itemsize=itemsize, weight_size=itemsize, shared=shared)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    groups: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    expected: int,
) -> None:
    experts, n, k = weight.shape
    masked = x.ndim == 3
    if rows == 0 or n == 0 or experts == 0:
        return
    widen = x_scale is not None and not multiplies(x.device, x.dtype)
    fnuz = x.dtype == torch.float8_e4m3fnuz
    if widen:
        x = x.view(torch.uint8)
        weight = weight.view(torch.uint8)
    tiles = choose_tiles(expected, x.element_size(), shared_memory(x.device), widen)
    row_tiles = -(-rows // tiles.block_m)
    column_tiles = -(-n // tiles.block_n)
    x_group_stride = x.stride(0) if masked else 0
    out_group_stride = out.stride(0) if masked else 0
    grouped_product[(row_tiles * column_tiles, experts if masked else 1)](
        x, weight, x_scale, weight_scale, groups, out, rows,
        x.stride(-2), x_group_stride, out.stride(-2), out_group_stride,
        EXPERTS=experts, K=k, N=n, MASKED=masked, SCALED=x_scale is not None,
        WIDEN=widen, FNUZ=fnuz,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP=tiles.group,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
