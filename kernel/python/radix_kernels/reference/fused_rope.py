"""Q/K norm, RoPE and KV store in one."""

from __future__ import annotations

import torch

from .kv_cache import store_kv_cache
from .norm import rmsnorm
from .rope import apply_rope_inplace


def fused_qk_norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float = 1e-6,
    is_neox: bool = True,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> None:
    """See `radix_kernels.fused_qk_norm_rope_store`."""
    wide_q = q.to(compute_dtype, copy=True)
    wide_k = k.to(compute_dtype, copy=True)
    if q_weight is not None and k_weight is not None:
        rmsnorm(wide_q, q_weight, eps, out=wide_q, compute_dtype=compute_dtype)
        rmsnorm(wide_k, k_weight, eps, out=wide_k, compute_dtype=compute_dtype)
    apply_rope_inplace(
        positions,
        wide_q,
        wide_k,
        q.shape[2],
        cos_sin_cache,
        is_neox=is_neox,
        compute_dtype=compute_dtype,
    )
    if k_scale is None:
        wide_k = wide_k.to(k_cache.dtype)
        v = v.to(v_cache.dtype)
    store_kv_cache(wide_k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    q.copy_(wide_q)
