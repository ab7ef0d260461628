"""Quantization to INT8, a scale a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .linear import quantize_rows


def per_token_quant_int8(
    input: torch.Tensor, *, compute_dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.per_token_quant_int8`."""
    return _quantized(input.to(compute_dtype))


def silu_and_mul_quant_int8(
    input: torch.Tensor, *, compute_dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.silu_and_mul_quant_int8`."""
    gate, up = input.to(compute_dtype).chunk(2, dim=-1)
    return _quantized(F.silu(gate) * up)


def rmsnorm_quant_int8(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.rmsnorm_quant_int8`."""
    x = input.to(compute_dtype)
    if residual is not None:
        x = x + residual.to(compute_dtype)
        residual.copy_(x)
    return _quantized(
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(compute_dtype)
    )


def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales [..., 1]). Both are made of float32 values, whatever these were made in."""
    codes, scales = quantize_rows(x.reshape(-1, x.shape[-1]), 0)
    return codes.view(x.shape), scales.view(*x.shape[:-1], 1)
