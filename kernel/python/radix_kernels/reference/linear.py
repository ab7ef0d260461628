"""Dense layers and embedding lookup."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._out import finish


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.linear`; weight is the unpacked [N, K]."""
    wide_bias = None if bias is None else bias.to(compute_dtype)
    result = F.linear(x.to(compute_dtype), weight.to(compute_dtype), wide_bias)
    if residual is not None:
        result = result + residual.to(compute_dtype)
    return finish(result, out, out_dtype or x.dtype)


def embedding(ids: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `radix_kernels.embedding`; bits are copied, so there is no compute dtype."""
    if ids.device.type == "cpu" and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= weight.shape[0]:
            bad = low if low < 0 else high
            raise ValueError(f"embedding: ids holds {bad}, expected 0 .. {weight.shape[0] - 1}")
    return finish(weight[ids.long()], out, weight.dtype)
