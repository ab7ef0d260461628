"""What stands between the QKV projection and attention, in one pass: q/k norm, RoPE and the KV
store."""

from __future__ import annotations

from typing import Any

from . import _arrays, _checks, _dispatch
from ._arrays import Array


def fused_qk_norm_rope_store(
    q: Array,
    k: Array,
    v: Array,
    q_weight: Array | None,
    k_weight: Array | None,
    cos_sin_cache: Array,
    positions: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    eps: float = 1e-6,
    is_neox: bool = True,
) -> None:
    """Normalise and rotate every head of q and k; q in place, k and v to their slots of the cache.

    The same as `rmsnorm` over each head of q and k (left out where both weights are None),
    `apply_rope_inplace` and `store_kv_cache` one after the other, but for the roundings between
    them: computed in float32, rounded once. q: [T, Hq, D]; k, v: [T, Hkv, D], not changed; k_cache,
    v_cache: [pages, page_size, Hkv, D]; all of one dtype (bfloat16, float16, float32), last
    dimension contiguous, other strides free; D even, at most 256. q_weight, k_weight: [D], q's
    dtype or float32. cos_sin_cache: float32 [max_position, rotary_dim], rotary_dim even and at most
    D. positions: int32 or int64 [T]. slot_mapping: int64 [T]; -1: the token's k and v are not
    stored. Tolerances: docs/numerics.md.

    Errors: TypeError (dtype), ValueError (shape, stride, one weight without the other; on the CPU
    also a position or slot out of range, before anything is written; on a GPU such a token is
    skipped).
    """
    op = "fused_qk_norm_rope_store"
    run = _dispatch.native(op, q)
    if run is not None:
        run(
            q,
            k,
            v,
            q_weight,
            k_weight,
            cos_sin_cache,
            positions,
            k_cache,
            v_cache,
            slot_mapping,
            eps,
            is_neox,
        )
        return
    from . import reference

    arrays = (q, k, v, q_weight, k_weight, cos_sin_cache, positions, k_cache, v_cache, slot_mapping)
    tensors = [_arrays.as_torch(x) for x in arrays]
    _check(op, *tensors)
    reference.fused_qk_norm_rope_store(
        *tensors, eps=eps, is_neox=is_neox, compute_dtype=reference.float32()
    )


def _check(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    q_weight: Any,
    k_weight: Any,
    table: Any,
    positions: Any,
    kc: Any,
    vc: Any,
    slots: Any,
) -> None:
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
    for name, cache in (("k_cache", kc), ("v_cache", vc)):
        _checks.rank(op, name, cache, 4)
        _checks.shape(
            op, name, cache, (*kc.shape[:2], *k.shape[1:]), "pages of k_cache, heads of k"
        )
    for name, x in (("q", q), ("k", k), ("v", v), ("k_cache", kc), ("v_cache", vc)):
        _checks.same_dtype(op, name, x, "q", q)
        _checks.contiguous_last(op, name, x)
    _checks.require(
        op, (q_weight is None) == (k_weight is None), "q_weight and k_weight go together"
    )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            _checks.shape(op, name, weight, (dim,), "head dimension of q")
            if weight.dtype != q.dtype and _arrays.dtype_name(weight) != "float32":
                raise TypeError(
                    f"{op}: {name} has dtype {weight.dtype}, expected {q.dtype} or float32"
                )
    if q_weight is not None:
        _checks.same_dtype(op, "k_weight", k_weight, "q_weight", q_weight)
    _checks.dtype(op, "cos_sin_cache", table, ("float32",))
    _checks.rank(op, "cos_sin_cache", table, 2)
    rotary = table.shape[1]
    _checks.require(
        op,
        rotary % 2 == 0 and 2 <= rotary <= dim,
        f"cos_sin_cache has {rotary} columns, expected an even number up to {dim}",
    )
    _checks.dtype(op, "positions", positions, _checks.INTS)
    _checks.dtype(op, "slot_mapping", slots, ("int64",))
    _checks.shape(op, "positions", positions, (tokens,), "tokens of q")
    _checks.shape(op, "slot_mapping", slots, (tokens,), "tokens of q")
