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
    k_scale: Array | None = None,
    v_scale: Array | None = None,
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

    INT8 (natively on the CPU alone) and FP8 (on GPUs alone): the caches and k_scale, v_scale are
    then those of `store_kv_cache`; keys are quantized from float32, without a rounding before.

    Errors: TypeError (dtype), ValueError (shape, stride, one weight without the other; on the CPU
    also a position or slot out of range, before anything is written; on a GPU such a token is
    skipped).
    """
    op = "fused_qk_norm_rope_store"
    arrays = (
        q, k, v, q_weight, k_weight, cos_sin_cache, positions, k_cache, v_cache, slot_mapping,
    )  # fmt: skip
    scales = (k_scale, v_scale)
    if _dispatch.attempt(op, q, lambda run, bound: run(*arrays, eps, is_neox, *scales)):
        return
    tensors = torch_views(*arrays)
    k_scales, v_scales = torch_views(*scales)
    check_fused(op, *tensors, k_scale=k_scales, v_scale=v_scales)
    reference.fused_qk_norm_rope_store(
        *tensors,
        eps=eps,
        is_neox=is_neox,
        k_scale=k_scales,
        v_scale=v_scales,
        compute_dtype=reference.float32(),
    )
