"""What stands between the QKV projection and attention, in one pass: q/k norm, RoPE and the KV
store."""

from __future__ import annotations

from . import _dispatch
from ._arrays import Array, torch_views
from ._checks.rope import check_fused
from ._lazy import reference


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
            q, k, v, q_weight, k_weight, cos_sin_cache, positions, k_cache, v_cache, slot_mapping,
            eps, is_neox,
        )  # fmt: skip
        return
    tensors = torch_views(
        q, k, v, q_weight, k_weight, cos_sin_cache, positions, k_cache, v_cache, slot_mapping
    )
    check_fused(op, *tensors)
    reference.fused_qk_norm_rope_store(
        *tensors, eps=eps, is_neox=is_neox, compute_dtype=reference.float32()
    )
