"""Grouped products in Triton: tile choice and launch."""

from __future__ import annotations

import torch

from .grouped_gemm_kernel import grouped_product

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
    block_m = next((m for m in (16, 32, 64) if expected_m <= m), ALIGNMENT)
    _launch(x, weight, x_scale, weight_scale, masked_m, out, x.shape[1], block_m)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    groups: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    block_m: int,
) -> None:
    experts, n, k = weight.shape
    masked = x.ndim == 3
    if rows == 0 or n == 0 or experts == 0:
        return
    wide = x.element_size() == 4
    scaled = x_scale is not None
    # FP8 sums are held twice: the block's and the whole.
    block_n, block_k = (32, 32) if wide else (128, 128 if scaled else 64)
    block_m = min(block_m, 32) if wide else block_m
    grid = (-(-rows // block_m) * -(-n // block_n), experts if masked else 1)
    grouped_product[grid](
        x, weight, x_scale, weight_scale, groups, out, rows,
        x.stride(-2), x.stride(0) if masked else 0, out.stride(-2), out.stride(0) if masked else 0,
        K=k, N=n, MASKED=masked, SCALED=scaled, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, GROUP=8, num_warps=8 if block_m >= 128 else 4,
        num_stages=2 if wide or torch.version.hip else 3 if scaled else 4,
    )  # fmt: skip
