"""Writing keys and values into the paged cache."""

from __future__ import annotations

from . import _arrays, _checks, _dispatch
from ._arrays import Array


def store_kv_cache(k: Array, v: Array, k_cache: Array, v_cache: Array, slot_mapping: Array) -> None:
    """Copy row t of k and v to slot `slot_mapping[t]` of the caches, in place.

    k, v: [T, Hkv, D] (v's head dimension may differ). k_cache, v_cache: [pages, page_size, Hkv,
    D] of k's dtype (bfloat16, float16, float32). Every stride but the last is free.
    slot_mapping: int64 [T]; slot s is page `s // page_size`, offset `s % page_size`; -1 skips the
    row. Slots are unique, apart from -1 (a slot named twice holds either row). Bits are copied.

    Errors: TypeError (dtype), ValueError (shape, stride; on the CPU also a slot outside of
    -1 .. pages * page_size - 1, before anything is written).
    """
    op = "store_kv_cache"
    run = _dispatch.native(op, k)
    if run is not None:
        run(k, v, k_cache, v_cache, slot_mapping)
        return
    from . import reference

    tensors = [_arrays.as_torch(x) for x in (k, v, k_cache, v_cache, slot_mapping)]
    tk, tv, tkc, tvc, slots = tensors
    _checks.dtype(op, "slot_mapping", slots, ("int64",))
    for name, x, cache_name, cache in (("k", tk, "k_cache", tkc), ("v", tv, "v_cache", tvc)):
        _checks.dtype(op, name, x, _checks.FLOATS)
        _checks.same_dtype(op, cache_name, cache, name, x)
        _checks.rank(op, name, x, 3)
        _checks.rank(op, cache_name, cache, 4)
        _checks.shape(op, cache_name, cache, (*tkc.shape[:2], *x.shape[1:]), f"heads of {name}")
        _checks.contiguous_last(op, name, x)
        _checks.contiguous_last(op, cache_name, cache)
        _checks.shape(op, "slot_mapping", slots, x.shape[:1], f"rows of {name}")
    reference.store_kv_cache(tk, tv, tkc, tvc, slots)
