"""RMS and layer normalisation."""

from __future__ import annotations

import torch

from ._out import finish


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.rmsnorm`."""
    x = input.to(compute_dtype)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return finish(x * scale * weight.to(compute_dtype), out, input.dtype)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> None:
    """See `radix_kernels.fused_add_rmsnorm`."""
    total = input.to(compute_dtype) + residual.to(compute_dtype)
    residual.copy_(total)
    rmsnorm(total, weight, eps, out=input, compute_dtype=compute_dtype)


def layernorm(
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.layernorm`."""
    x = input.to(compute_dtype)
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(compute_dtype)
    if bias is not None:
        y = y + bias.to(compute_dtype)
    return finish(y, out, input.dtype)
