"""Dense products with fused epilogues, FP8 and INT8 products with scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._out import finish

BLOCK = 128


def linear_silu_and_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.linear_silu_and_mul`."""
    result = F.linear(x.to(compute_dtype), weight.to(compute_dtype))
    return finish(_gated(result, interleaved), out, x.dtype)


def fp8_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.fp8_scaled_mm`."""
    scale = scales_a.to(compute_dtype).reshape(-1, 1) * scales_b.to(compute_dtype).reshape(1, -1)
    result = mat_a.to(compute_dtype) @ mat_b.to(compute_dtype) * scale
    if bias is not None:
        result = result + bias.to(compute_dtype)
    return finish(result, out, out_dtype)


def int8_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    *,
    azp: torch.Tensor | None = None,
    b_sums: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.int8_scaled_mm`; sums are exact whatever compute_dtype is."""
    sums = mat_a.double() @ mat_b.double()
    if azp is not None and b_sums is not None:
        sums = sums - azp.double().reshape(-1, 1) * b_sums.double()
    scale = scales_a.to(compute_dtype).reshape(-1, 1) * scales_b.to(compute_dtype).reshape(1, -1)
    result = sums.to(compute_dtype) * scale
    if bias is not None:
        result = result + bias.to(compute_dtype)
    return finish(result, out, out_dtype)


def fp8_blockwise_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.fp8_blockwise_scaled_mm`."""
    a = mat_a.to(compute_dtype) * scales_a.to(compute_dtype).repeat_interleave(BLOCK, 1)
    blocks = scales_b.to(compute_dtype).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return finish(a @ (mat_b.to(compute_dtype) * blocks), out, out_dtype)


def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.bmm_fp8`."""
    scale = A_scale.to(compute_dtype).reshape(()) * B_scale.to(compute_dtype).reshape(())
    return finish(A.to(compute_dtype) @ B.to(compute_dtype) * scale, out, dtype)


def _gated(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return F.silu(x[..., 0::2]) * x[..., 1::2]
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
