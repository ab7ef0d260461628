"""Attention, one row and one batch entry at a time."""

from __future__ import annotations

import torch

from ._out import finish


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.flash_attn_with_kvcache`."""
    page_size = k_cache.shape[1]
    result, lse = _buffers(q, compute_dtype, v_cache.shape[-1])
    starts = cu_seqlens_q.tolist()
    for row, kv_len in enumerate(kv_lens.tolist()):
        begin = starts[row]
        end = starts[row + 1]
        if begin == end:
            continue
        pages = page_table[row, : -(-kv_len // page_size)].long()
        result[begin:end], lse[begin:end] = _attend(
            _scaled(q[begin:end], q_scale, compute_dtype),
            _gather(k_cache, pages, kv_len, k_scale, compute_dtype),
            _gather(v_cache, pages, kv_len, v_scale, compute_dtype),
            softmax_scale, causal, window_size, softcap, sinks, compute_dtype,
        )  # fmt: skip
    result = finish(result, out, torch.bfloat16 if q_scale is not None else q.dtype)
    return (result, _lse_dtype(lse, q)) if return_softmax_lse else result


def flash_attn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.flash_attn_varlen`."""
    result, lse = _buffers(q, compute_dtype, v.shape[-1])
    q_starts = cu_seqlens_q.tolist()
    k_starts = cu_seqlens_k.tolist()
    for row in range(len(q_starts) - 1):
        rows = slice(q_starts[row], q_starts[row + 1])
        keys = slice(k_starts[row], k_starts[row + 1])
        if rows.start < rows.stop:
            result[rows], lse[rows] = _attend(
                _scaled(q[rows], q_scale, compute_dtype),
                _scaled(k[keys], k_scale, compute_dtype),
                _scaled(v[keys], v_scale, compute_dtype),
                softmax_scale, causal, window_size, softcap, sinks, compute_dtype,
            )  # fmt: skip
    result = finish(result, out, torch.bfloat16 if q_scale is not None else q.dtype)
    return (result, _lse_dtype(lse, q)) if return_softmax_lse else result


def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `radix_kernels.merge_state`."""
    both = torch.stack((lse_a, lse_b)).to(compute_dtype)
    total = torch.logsumexp(both, 0)
    weights = torch.where(both == -torch.inf, 0.0, torch.exp(both - total))[..., None]
    values = torch.stack((out_a, out_b)).to(compute_dtype)
    # A side that saw nothing is not used, whatever its out holds.
    result = torch.where(weights == 0, 0.0, weights * values).sum(0)
    return finish(result, out, out_a.dtype), finish(total, lse, lse_a.dtype)


def _buffers(
    q: torch.Tensor, compute: torch.dtype, v_dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero outputs and -inf sums: what a query that sees nothing gets. v_dim: default q's last
    dimension."""
    result = torch.zeros((*q.shape[:2], v_dim or q.shape[-1]), dtype=compute, device=q.device)
    return result, torch.full(q.shape[:2], -torch.inf, dtype=compute, device=q.device)


def _gather(
    cache: torch.Tensor,
    pages: torch.Tensor,
    kv_len: int,
    scale: torch.Tensor | None,
    compute: torch.dtype,
) -> torch.Tensor:
    """A row's keys or values, [kv_len, Hkv, D]; an INT8 cache has one scale per token and head."""
    tokens = cache[pages].flatten(0, 1)[:kv_len]
    if scale is None or scale.ndim == 1:
        return _scaled(tokens, scale, compute)
    return tokens.to(compute) * scale[pages].flatten(0, 1)[:kv_len].to(compute)[..., None]


def _scaled(x: torch.Tensor, scale: torch.Tensor | None, compute: torch.dtype) -> torch.Tensor:
    """A row's queries, keys or values, [n, heads, D], times their scale where they are FP8."""
    if scale is None:
        return x
    if scale.shape[0] > 1:
        scale = scale.repeat_interleave(x.shape[1] // scale.shape[0])
    return x.to(compute) * scale.to(compute)[:, None]


def _lse_dtype(lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q [n, Hq, D], k [m, Hkv, D], v [m, Hkv, Dv] -> out [n, Hq, Dv], lse [n, Hq]."""
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    wide_k = k.to(compute).repeat_interleave(group, 1)
    wide_v = v.to(compute).repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q.to(compute), wide_k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(q.shape[0], k.shape[0], causal, window_size, q.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.to(compute)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, column), -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None])[..., : k.shape[0]]
    # A query that sees nothing has lse -inf and NaN weights.
    weights = weights.masked_fill((lse == -torch.inf)[..., None], 0.0)
    return torch.einsum("hnm,mhd->nhd", weights, wide_v), lse.transpose(0, 1)


def _visible(
    n: int, m: int, causal: bool, window_size: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """bool [n, m]: which of m keys each of the last n positions sees."""
    left, right = window_size
    at = torch.arange(n, device=device)[:, None] + (m - n)
    key = torch.arange(m, device=device)[None, :]
    seen = torch.ones(n, m, dtype=torch.bool, device=device)
    if causal or right == 0:
        seen &= key <= at
    if left >= 0:
        seen &= key >= at - left
    return seen
