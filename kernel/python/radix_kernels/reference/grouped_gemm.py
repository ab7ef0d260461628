"""Grouped products."""

from __future__ import annotations

import torch


def m_grouped_gemm_contiguous(
    x: torch.Tensor,
    weight: torch.Tensor,
    m_indices: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.m_grouped_gemm_contiguous`. Without `out`, of compute_dtype, and 0 where
    rows are padding."""
    result = _result(x, weight, out, compute_dtype)
    for group in range(weight.shape[0]):
        rows = (m_indices == group).nonzero().flatten()
        scale = None if weight_scale is None else weight_scale[group]
        _multiply(result, (rows,), x, weight[group], x_scale, scale)
    return result


def m_grouped_gemm_masked(
    x: torch.Tensor,
    weight: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `radix_kernels.m_grouped_gemm_masked`. Without `out`, of compute_dtype, and 0 past a
    group's rows."""
    result = _result(x, weight, out, compute_dtype)
    for group, count in enumerate(masked_m.tolist()):
        rows = torch.arange(min(max(count, 0), x.shape[1]), device=x.device)
        places = (torch.full_like(rows, group), rows)
        scale = None if weight_scale is None else weight_scale[group]
        _multiply(result, places, x, weight[group], x_scale, scale)
    return result


def _result(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if out is not None:
        return out
    return torch.zeros((*x.shape[:-1], weight.shape[1]), dtype=dtype, device=x.device)


def _multiply(
    result: torch.Tensor,
    places: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> None:
    """result[places] = x[places] @ weight.T, each with its scales."""
    dtype = result.dtype if result.dtype.itemsize > 2 else torch.float32
    rows = x[places].to(dtype)
    w = weight.to(dtype)
    if x_scale is not None and weight_scale is not None:
        rows = rows * x_scale[places].to(dtype).repeat_interleave(128, 1)[:, : rows.shape[1]]
        factor = weight_scale.to(dtype).repeat_interleave(128, 0).repeat_interleave(128, 1)
        w = w * factor[: w.shape[0], : w.shape[1]]
    result[places] = (rows @ w.T).to(result.dtype)
