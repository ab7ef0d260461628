"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..gating import GELU, GELU_TANH, SWIGLU_CLAMPED, Activation, read_gating
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


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`act(gate) * up` of an activation that experts have, in the tensors' dtype."""
    gating = read_gating("gated", activation)
    if gating.number == SWIGLU_CLAMPED:
        gate = gate.clamp(max=gating.limit)
        up = up.clamp(-gating.limit, gating.limit)
        return gate * (gate * gating.alpha).sigmoid() * (up + 1)
    if gating.number == GELU:
        return F.gelu(gate) * up
    if gating.number == GELU_TANH:
        return F.gelu(gate, approximate="tanh") * up
    return F.silu(gate) * up
