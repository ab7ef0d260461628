"""The ops as torch custom ops, for `torch.compile`.

Importing this module registers `torch.ops.radix_kernels.<op>`; nothing else does. Each op has a
fake implementation, so tracing never runs a kernel. Names and meaning are those of `radix_kernels`;
outputs are always new tensors, and optional keywords are positional with the same defaults.
"""

from __future__ import annotations

import torch

import radix_kernels as rk

_op = torch.library.custom_op


@_op("radix_kernels::rmsnorm", mutates_args=())
def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """See `radix_kernels.rmsnorm`."""
    return rk.rmsnorm(input, weight, eps, out=_contiguous_like(input))


@rmsnorm.register_fake
def _(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return _contiguous_like(input)


@_op("radix_kernels::fused_add_rmsnorm", mutates_args=("input", "residual"))
def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> None:
    """See `radix_kernels.fused_add_rmsnorm`."""
    rk.fused_add_rmsnorm(input, residual, weight, eps)


@fused_add_rmsnorm.register_fake
def _(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    return None


@_op("radix_kernels::silu_and_mul", mutates_args=())
def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    """See `radix_kernels.silu_and_mul`."""
    return rk.silu_and_mul(input)


@_op("radix_kernels::gelu_and_mul", mutates_args=())
def gelu_and_mul(input: torch.Tensor) -> torch.Tensor:
    """See `radix_kernels.gelu_and_mul`."""
    return rk.gelu_and_mul(input)


@_op("radix_kernels::gelu_tanh_and_mul", mutates_args=())
def gelu_tanh_and_mul(input: torch.Tensor) -> torch.Tensor:
    """See `radix_kernels.gelu_tanh_and_mul`."""
    return rk.gelu_tanh_and_mul(input)


def _gated(input: torch.Tensor) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2))


for _gate in (silu_and_mul, gelu_and_mul, gelu_tanh_and_mul):
    _gate.register_fake(_gated)


@_op("radix_kernels::apply_rope_inplace", mutates_args=("query", "key"))
def apply_rope_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """See `radix_kernels.apply_rope_inplace`; key is required."""
    rk.apply_rope_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=is_neox)


@apply_rope_inplace.register_fake
def _(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    return None


@_op("radix_kernels::store_kv_cache", mutates_args=("k_cache", "v_cache"))
def store_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `radix_kernels.store_kv_cache`."""
    rk.store_kv_cache(k, v, k_cache, v_cache, slot_mapping)


@store_kv_cache.register_fake
def _(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    return None


@_op("radix_kernels::flash_attn_with_kvcache", mutates_args=())
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `radix_kernels.flash_attn_with_kvcache`; the window's right side is -1, and FP8 queries
    get bfloat16."""
    return rk.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        page_table,
        kv_lens,
        cu_seqlens_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_left, -1),
        softcap=softcap,
        sinks=sinks,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        out=_attended(q, v_cache),
    )


@flash_attn_with_kvcache.register_fake
def _(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return _attended(q, v_cache)


def _attended(q: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1]), dtype=dtype)


def _contiguous_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)
