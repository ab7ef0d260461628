"""INT8 products with scales in Triton: launch. Tiles are those of FP8 products."""

from __future__ import annotations

import torch

from .fp8_gemm import choose_tiles, scale_step
from .int8_gemm_kernel import int8_product
from .moe import shared_memory


def int8_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    azp: torch.Tensor | None,
    b_sums: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See `radix_kernels.int8_scaled_mm`, which has checked the arguments."""
    if out.numel() == 0:
        return
    rows, k = mat_a.shape
    n = mat_b.shape[1]
    tiles = choose_tiles(rows, False, shared_memory(mat_a.device))
    row_tiles = -(-rows // tiles.block_m)
    column_tiles = -(-n // tiles.block_n)
    int8_product[(row_tiles * column_tiles,)](
        mat_a, mat_b, scales_a, scales_b, azp, b_sums, bias, out,
        rows, mat_a.stride(0), mat_b.stride(1), out.stride(0),
        scale_step(scales_a, rows), scale_step(scales_b, n),
        0 if azp is None else scale_step(azp, rows),
        N=n, K=k, SHIFTED=azp is not None, BIAS=bias is not None,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP=tiles.group,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
