"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._out import finish


def silu_and_mul(
    input: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.silu_and_mul`."""
    gate, up = input.to(compute_dtype).chunk(2, -1)
    return finish(F.silu(gate) * up, out, input.dtype)


def gelu_and_mul(
    input: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.gelu_and_mul`."""
    gate, up = input.to(compute_dtype).chunk(2, -1)
    return finish(F.gelu(gate) * up, out, input.dtype)


def gelu_tanh_and_mul(
    input: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.gelu_tanh_and_mul`."""
    gate, up = input.to(compute_dtype).chunk(2, -1)
    return finish(F.gelu(gate, approximate="tanh") * up, out, input.dtype)
