"""Writing keys and values into the paged cache."""

from __future__ import annotations

from . import _dispatch
from ._arrays import Array, torch_views
from ._checks.kv_cache import check_store
from ._lazy import reference


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
    call = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if _dispatch.attempt(op, k, lambda run, bound: run(*call)):
        return
    k, v, k_cache, v_cache, slots, k_scale, v_scale = torch_views(*call)
    check_store(op, k, v, k_cache, v_cache, slots, k_scale, v_scale)
    reference.store_kv_cache(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
