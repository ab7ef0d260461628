"""Argument checks of the KV store, for the reference."""

from __future__ import annotations

from typing import Any

from .. import _checks
from .attention import check_scale, is_scaled


def check_store(
    op: str, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, k_scale: Any, v_scale: Any
) -> None:
    """TypeError or ValueError unless the tensors of `store_kv_cache` fit together."""
    _checks.dtype(op, "slot_mapping", slots, ("int64",))
    _check_side(op, "k", k, k_cache, k_scale, k_cache, slots)
    _check_side(op, "v", v, v_cache, v_scale, k_cache, slots)


def _check_side(
    op: str, name: str, x: Any, cache: Any, scale: Any, k_cache: Any, slots: Any
) -> None:
    """Keys or values, their cache and their scales."""
    cache_name = f"{name}_cache"
    scaled = is_scaled(k_cache)
    _checks.dtype(op, name, x, _checks.FLOATS)
    if scaled:
        _checks.same_dtype(op, cache_name, cache, "k_cache", k_cache)
    else:
        _checks.same_dtype(op, cache_name, cache, name, x)
    _checks.rank(op, name, x, 3)
    _checks.rank(op, cache_name, cache, 4)
    _checks.shape(op, cache_name, cache, (*k_cache.shape[:2], *x.shape[1:]), f"heads of {name}")
    _checks.contiguous_last(op, name, x)
    _checks.contiguous_last(op, cache_name, cache)
    _checks.shape(op, "slot_mapping", slots, x.shape[:1], f"rows of {name}")
    why = f"{name}_scale is given or missing: FP8 and INT8 caches, and no others, have scales"
    _checks.require(op, scaled == (scale is not None), why)
    if scale is not None:
        check_scale(op, f"{name}_scale", scale, cache_name, cache)
