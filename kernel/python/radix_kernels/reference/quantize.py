"""Quantization to FP8."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_E4M3: Any = getattr(torch, "float8_e4m3fn", None)  # torch before 2.1 has no FP8

SMALLEST = 1e-10  # stands for the largest value of a group of zeros


def per_tensor_quant_fp8(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = _E4M3,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.per_tensor_quant_fp8`."""
    x = input.to(compute_dtype)
    if scale is None:
        largest = x.abs().max() if x.numel() else x.new_zeros(())
        scale = _scale(largest, dtype).reshape(1).float()
    return _quantized(x, scale.to(compute_dtype), dtype), scale


def per_token_quant_fp8(
    input: torch.Tensor, *, dtype: torch.dtype = _E4M3, compute_dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.per_token_quant_fp8`."""
    return _grouped(input.to(compute_dtype), None, dtype)


def per_token_group_quant(
    input: torch.Tensor,
    group_size: int | None = 128,
    *,
    dtype: torch.dtype = _E4M3,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.per_token_group_quant`; group_size None: one scale per row."""
    return _grouped(input.to(compute_dtype), group_size, dtype)


def silu_and_mul_quant_fp8(
    input: torch.Tensor,
    group_size: int | None = 128,
    *,
    dtype: torch.dtype = _E4M3,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.silu_and_mul_quant_fp8`."""
    gate, up = input.to(compute_dtype).chunk(2, dim=-1)
    return _grouped(F.silu(gate) * up, group_size, dtype)


def rmsnorm_quant_fp8(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    group_size: int | None = 128,
    *,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = _E4M3,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.rmsnorm_quant_fp8`."""
    x = input.to(compute_dtype)
    if residual is not None:
        x = x + residual.to(compute_dtype)
        residual.copy_(x)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(compute_dtype)
    return _grouped(x, group_size, dtype)


def _grouped(
    x: torch.Tensor, group_size: int | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    # Scales are float32 wherever they are kept: values are divided by what is kept.
    scales = _scale(groups.abs().amax(-1, keepdim=True), dtype).float()
    return _quantized(groups, scales.to(x.dtype), dtype).flatten(-2), scales.squeeze(-1)


def _scale(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return largest.clamp(min=SMALLEST) / torch.finfo(dtype).max


def _quantized(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return (x / scale).clamp(-limit, limit).float().to(dtype)
