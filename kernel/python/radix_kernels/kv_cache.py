"""Writing keys and values into the paged cache."""

from __future__ import annotations

from . import _arrays, _checks, _dispatch
from ._arrays import Array
from ._attention_checks import check_scale, is_scaled


def store_kv_cache(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> None:
    """Copy row t of k and v to slot `slot_mapping[t]` of the caches, in place.

    k, v: [T, Hkv, D] (v's head dimension may differ). k_cache, v_cache: [pages, page_size, Hkv,
    D] of k's dtype (bfloat16, float16, float32). Every stride but the last is free.
    slot_mapping: int64 [T]; slot s is page `s // page_size`, offset `s % page_size`; -1 skips the
    row. Slots are unique, apart from -1 (a slot named twice holds either row). Bits are copied.

    INT8 (natively on the CPU alone): the caches may be int8; k_scale and v_scale, float32 [pages,
    page_size, Hkv], are then required and written too. Each row and head is stored as
    `round(x / scale)`, to nearest even, with `scale = max |x| / 127`; x is finite.

    FP8 (natively on GPUs alone): the caches may be float8_e4m3fn (float8_e4m3fnuz on gfx942);
    k_scale and v_scale, float32 [1] or [Hkv] and above 0, are then required and read: `x / scale`
    is stored, to nearest even, clamped to the largest finite value, as attention reads it; NaN
    stays NaN.

    Errors: TypeError (dtype), ValueError (shape, stride; on the CPU also a slot outside of
    -1 .. pages * page_size - 1, before anything is written).
    """
    op = "store_kv_cache"
    call = k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale
    if _dispatch.attempt(op, k, lambda run, _: run(*call)):
        return
    from . import reference

    tk, tv, tkc, tvc, slots, ks, vs = (_arrays.as_torch(x) for x in call)
    _checks.dtype(op, "slot_mapping", slots, ("int64",))
    scaled = is_scaled(tkc)
    for name, x, cache_name, cache, scale in (
        ("k", tk, "k_cache", tkc, ks),
        ("v", tv, "v_cache", tvc, vs),
    ):
        _checks.dtype(op, name, x, _checks.FLOATS)
        _checks.same_dtype(op, cache_name, cache, *(("k_cache", tkc) if scaled else (name, x)))
        _checks.rank(op, name, x, 3)
        _checks.rank(op, cache_name, cache, 4)
        _checks.shape(op, cache_name, cache, (*tkc.shape[:2], *x.shape[1:]), f"heads of {name}")
        _checks.contiguous_last(op, name, x)
        _checks.contiguous_last(op, cache_name, cache)
        _checks.shape(op, "slot_mapping", slots, x.shape[:1], f"rows of {name}")
        why = f"{name}_scale is given or missing: FP8 and INT8 caches, and no others, have scales"
        _checks.require(op, scaled == (scale is not None), why)
        if scale is not None:
            check_scale(op, f"{name}_scale", scale, cache_name, cache)
    reference.store_kv_cache(tk, tv, tkc, tvc, slots, k_scale=ks, v_scale=vs)
