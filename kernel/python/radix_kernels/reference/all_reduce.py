"""What the collectives between GPUs compute, from the inputs of all ranks in one place."""

from __future__ import annotations

import torch

from .norm import fused_add_rmsnorm


def all_reduce(inputs: torch.Tensor, *, compute_dtype: torch.dtype) -> torch.Tensor:
    """inputs [world_size, ...], one rank after the other; the sum in rank order, rounded once."""
    total = inputs[0].to(compute_dtype)
    for part in inputs[1:]:
        total = total + part.to(compute_dtype)
    return total.to(inputs.dtype)


def all_reduce_add_rmsnorm(
    inputs: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    compute_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual + all_reduce(inputs), its norm): `fused_add_rmsnorm` of the sum over the ranks,
    which is taken in float32 and rounded to the residual's dtype."""
    out = all_reduce(inputs, compute_dtype=torch.float32)
    new = residual.clone()
    fused_add_rmsnorm(out, new, weight, eps, compute_dtype=compute_dtype)
    return new, out
