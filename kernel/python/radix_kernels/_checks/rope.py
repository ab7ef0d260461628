"""Argument checks of rotary embedding, alone and fused with the norms and the KV store, for the
reference."""

from __future__ import annotations

from typing import Any

from .. import _checks
from .._arrays import dtype_name
from .kv_cache import check_store


def check_rope(op: str, positions: Any, query: Any, key: Any, head_size: int, table: Any) -> None:
    """TypeError or ValueError unless the arguments of `apply_rope_inplace` fit together."""
    _checks.dtype(op, "positions", positions, _checks.INTS)
    _checks.rank(op, "positions", positions, 1)
    _checks.dtype(op, "cos_sin_cache", table, ("float32",))
    _checks.rank(op, "cos_sin_cache", table, 2)
    rotary_dim = table.shape[1]
    _checks.require(
        op,
        rotary_dim % 2 == 0 and rotary_dim <= head_size,
        f"cos_sin_cache has {rotary_dim} columns, expected an even number up to {head_size}",
    )
    tokens = positions.shape[0]
    _check_heads(op, "query", query, query, tokens, head_size)
    if key is not None:
        _check_heads(op, "key", key, query, tokens, head_size)


def _check_heads(op: str, name: str, x: Any, query: Any, tokens: int, head_size: int) -> None:
    _checks.dtype(op, name, x, _checks.FLOATS)
    _checks.same_dtype(op, name, x, "query", query)
    _checks.rank(op, name, x, 2, 3)
    _checks.contiguous_last(op, name, x)
    rows = x.shape[0]
    _checks.require(op, rows == tokens, f"{name} has {rows} rows, expected {tokens} (positions)")
    fits = x.shape[1] % head_size == 0 if x.ndim == 2 else x.shape[2] == head_size
    _checks.require(
        op, fits, f"{name} has shape {list(x.shape)}, expected heads of {head_size} elements"
    )


def check_fused(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    q_weight: Any,
    k_weight: Any,
    table: Any,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    *,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """TypeError or ValueError unless the tensors of `fused_qk_norm_rope_store` fit together."""
    _check_qkv(op, q, k, v)
    check_store(op, k, v, k_cache, v_cache, slots, k_scale, v_scale)
    tokens, _, dim = q.shape
    _check_norm_weights(op, q, q_weight, k_weight)
    _checks.dtype(op, "cos_sin_cache", table, ("float32",))
    _checks.rank(op, "cos_sin_cache", table, 2)
    rotary_dim = table.shape[1]
    _checks.require(
        op,
        rotary_dim % 2 == 0 and 2 <= rotary_dim <= dim,
        f"cos_sin_cache has {rotary_dim} columns, expected an even number up to {dim}",
    )
    _checks.dtype(op, "positions", positions, _checks.INTS)
    _checks.shape(op, "positions", positions, (tokens,), "tokens of q")


def _check_qkv(op: str, q: Any, k: Any, v: Any) -> None:
    _checks.dtype(op, "q", q, _checks.FLOATS)
    _checks.rank(op, "q", q, 3)
    _checks.rank(op, "k", k, 3)
    tokens, _, dim = q.shape
    _checks.require(
        op,
        dim % 2 == 0 and 2 <= dim <= 256,
        f"q has head dimension {dim}, expected an even one up to 256",
    )
    _checks.shape(op, "k", k, (tokens, k.shape[1], dim), "tokens and head dimension of q")
    _checks.shape(op, "v", v, k.shape, "as k")
    for name, x in (("q", q), ("k", k), ("v", v)):
        _checks.same_dtype(op, name, x, "q", q)
        _checks.contiguous_last(op, name, x)


def _check_norm_weights(op: str, q: Any, q_weight: Any, k_weight: Any) -> None:
    _checks.require(
        op, (q_weight is None) == (k_weight is None), "q_weight and k_weight go together"
    )
    if q_weight is None:
        return
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        _checks.shape(op, name, weight, q.shape[-1:], "head dimension of q")
        if weight.dtype != q.dtype and dtype_name(weight) != "float32":
            raise TypeError(f"{op}: {name} has dtype {weight.dtype}, expected {q.dtype} or float32")
    _checks.same_dtype(op, "k_weight", k_weight, "q_weight", q_weight)
