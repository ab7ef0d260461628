"""Multi-head latent attention over a paged latent cache, in the absorbed form.

DeepSeek-V2, 2024, arXiv:2405.04434: the up-projection of the keys is multiplied into the queries beforehand and that of
the values into the output afterwards, so that all query heads attend to one latent head.
"""

from __future__ import annotations

from typing import Any

from . import _arrays, _checks, _dispatch, _loader
from ._arrays import Array

LATENT, ROPE = 512, 64
FP8_BYTES = 656  # of a token: 512 e4m3, 4 float32 scales of 128 values each, 64 bfloat16


def mla_decode(
    q_nope: Array,
    q_rope: Array,
    kv_cache: Array,
    page_table: Array,
    kv_lens: Array,
    cu_seqlens_q: Array,
    *,
    softmax_scale: float,
    causal: bool = True,
    return_softmax_lse: bool = False,
    max_seqlen_q: int | None = None,
    batch_invariant: bool = False,
    out: Array | None = None,
) -> Array:
    """Attention of a few query tokens a row over a paged latent cache.

    q_nope: [T, H, 512] and q_rope: [T, H, 64], bfloat16 or float16; kv_cache: [pages, page_size, 576] of that dtype: a
    token's 512 latent values, key and value at once, then its 64 rotary key values. Or the FP8 form, uint8 [pages,
    page_size, 656] (see `FP8_BYTES`). Last dimensions contiguous, other strides free. page_table: int32 [B, max_pages];
    kv_lens: int32 [B], the new tokens included; cu_seqlens_q: int32 [B + 1] from 0 to T; the q tokens of a row are the
    last of its kv tokens, and with `causal` each sees the tokens up to its own. softmax_scale has no default: it is
    that of the model's full head dimension. max_seqlen_q: the most q tokens of a row; a hint about speed.
    batch_invariant: a row's bits depend on its own length alone. Without it a long row may be split wherever the work
    of the batch divides evenly, which is faster, and its last bits can move with the other rows' lengths.

    Returns out [T, H, 512] of q's dtype, or (out, lse float32 [T, H], natural log). A query that sees nothing gets 0
    and -inf. Entries of page_table past ceil(kv_len / page_size) are never read, cache slots past kv_len never used.
    Tolerances: docs/numerics.md.
    Errors: TypeError (dtype), ValueError (shape, stride).
    """
    op = "mla_decode"
    _checks.require(
        op, max_seqlen_q is None or max_seqlen_q >= 0, f"max_seqlen_q is {max_seqlen_q}, expected 0 or more"
    )
    lse = _arrays.empty(q_nope, tuple(q_nope.shape)[:-1], "float32") if return_softmax_lse else None
    out = _arrays.empty_like(q_nope) if out is None else out
    result = (out, lse) if return_softmax_lse else out
    hint = max_seqlen_q or 0

    def call(run: _dispatch.Native, bound: bool) -> None:
        workspace = _workspace(q_nope, kv_cache, page_table, hint, not batch_invariant) if bound else None
        run(
            q_nope, q_rope, kv_cache, page_table, kv_lens, cu_seqlens_q,
            softmax_scale, causal, out, lse, workspace, hint, not batch_invariant,
        )  # fmt: skip

    if _dispatch.attempt(op, q_nope, call):
        return result
    from . import reference

    arrays = (q_nope, q_rope, kv_cache, page_table, kv_lens, cu_seqlens_q, out)
    tensors = [_arrays.as_torch(x) for x in arrays]
    _check(op, *tensors)
    _, result_lse = reference.mla_decode(
        *tensors[:6], softmax_scale=softmax_scale, causal=causal, return_softmax_lse=True, out=tensors[6],
        compute_dtype=reference.float32(),
    )  # fmt: skip
    if lse is not None:
        _arrays.as_torch(lse).copy_(result_lse)
    return result


def store_mla_kv(latent: Array, rope: Array, kv_cache: Array, slot_mapping: Array) -> None:
    """Write token t, its latent values and then its rotary ones, to slot `slot_mapping[t]` of a latent cache, in place.

    latent: [T, L] and rope: [T, R], bfloat16 or float16; kv_cache: [pages, page_size, L + R] of that dtype, bits are
    copied. Or the FP8 form of `mla_decode`, uint8 [pages, page_size, 656], from bfloat16 with L 512 and R 64: each 128
    latent values are divided by `max(largest magnitude, 1e-10) / 448`, their scale, and rounded to the nearest e4m3.
    Last dimensions contiguous, other strides free. slot_mapping: int64 [T]; slot s is page `s // page_size`, offset
    `s % page_size`; -1 skips the token. Slots are unique, apart from -1 (a slot named twice holds either token).

    vLLM's `concat_and_cache_mla` and SGLang's `set_mla_kv_buffer`. Errors: TypeError (dtype), ValueError (shape,
    stride; on the CPU also a slot outside of -1 .. pages * page_size - 1, before anything is written).
    """
    op = "store_mla_kv"
    if _dispatch.attempt(op, latent, lambda run, _: run(latent, rope, kv_cache, slot_mapping)):
        return
    from . import reference

    tl, tr, tc, slots = (_arrays.as_torch(x) for x in (latent, rope, kv_cache, slot_mapping))
    _checks.dtype(op, "latent", tl, ("bfloat16", "float16"))
    _checks.rank(op, "latent", tl, 2)
    _checks.same_dtype(op, "rope", tr, "latent", tl)
    _checks.rank(op, "rope", tr, 2)
    _checks.shape(op, "rope", tr, (tl.shape[0], tr.shape[1]), "tokens of latent")
    _checks.rank(op, "kv_cache", tc, 3)
    if _arrays.dtype_name(tc) == "uint8":
        _checks.dtype(op, "latent", tl, ("bfloat16",))
        _checks.shape(op, "kv_cache", tc, (*tc.shape[:2], FP8_BYTES), "bytes of an FP8 token")
        _checks.shape(op, "latent", tl, (tl.shape[0], LATENT), "latent size of an FP8 token")
        _checks.shape(op, "rope", tr, (tl.shape[0], ROPE), "rotary size of an FP8 token")
    else:
        _checks.same_dtype(op, "kv_cache", tc, "latent", tl)
        _checks.shape(op, "kv_cache", tc, (*tc.shape[:2], tl.shape[1] + tr.shape[1]), "latent and rotary values")
    _checks.dtype(op, "slot_mapping", slots, ("int64",))
    _checks.shape(op, "slot_mapping", slots, tl.shape[:1], "tokens of latent")
    for name, x in (("latent", tl), ("rope", tr), ("kv_cache", tc)):
        _checks.contiguous_last(op, name, x)
    reference.store_mla_kv(tl, tr, tc, slots)


def concat_mla_k(k: Array, k_nope: Array, k_rope: Array) -> None:
    """Fill the full keys of a prefill, in place: k[t, h] = k_nope[t, h] and then k_rope[t, 0], the same for every head.

    k: [T, H, N + R], k_nope: [T, H, N], k_rope: [T, 1, R], all bfloat16 or float16, last dimensions contiguous, other
    strides free. Bits are copied. The op of that name in sgl_kernel, for any N and R. Errors: TypeError (dtype),
    ValueError (shape, stride).
    """
    op = "concat_mla_k"
    if _dispatch.attempt(op, k_nope, lambda run, _: run(k, k_nope, k_rope)):
        return
    from . import reference

    tk, tn, tr = (_arrays.as_torch(x) for x in (k, k_nope, k_rope))
    _checks.dtype(op, "k_nope", tn, ("bfloat16", "float16"))
    for name, x in (("k_nope", tn), ("k_rope", tr), ("k", tk)):
        _checks.same_dtype(op, name, x, "k_nope", tn)
        _checks.rank(op, name, x, 3)
        _checks.contiguous_last(op, name, x)
    _checks.shape(op, "k_rope", tr, (tn.shape[0], 1, tr.shape[2]), "tokens of k_nope, one head")
    _checks.shape(op, "k", tk, (*tn.shape[:2], tn.shape[2] + tr.shape[2]), "as k_nope, with k_rope behind")
    reference.concat_mla_k(tk, tn, tr)


def _check(op: str, q: Any, rope: Any, cache: Any, table: Any, lens: Any, cu: Any, out: Any) -> None:
    _checks.dtype(op, "q_nope", q, ("bfloat16", "float16"))
    _checks.rank(op, "q_nope", q, 3)
    _checks.shape(op, "q_nope", q, (*q.shape[:2], LATENT))
    _checks.same_dtype(op, "q_rope", rope, "q_nope", q)
    _checks.shape(op, "q_rope", rope, (*q.shape[:2], ROPE), "tokens and heads of q_nope")
    _checks.rank(op, "kv_cache", cache, 3)
    if _arrays.dtype_name(cache) == "uint8":
        _checks.shape(op, "kv_cache", cache, (*cache.shape[:2], FP8_BYTES), "bytes of an FP8 token")
    else:
        _checks.same_dtype(op, "kv_cache", cache, "q_nope", q)
        _checks.shape(op, "kv_cache", cache, (*cache.shape[:2], LATENT + ROPE), "latent and rotary values")
    _checks.require(op, cache.shape[1] > 0, "kv_cache has page size 0")
    for name, x in (("page_table", table), ("kv_lens", lens), ("cu_seqlens_q", cu)):
        _checks.dtype(op, name, x, ("int32",))
    _checks.rank(op, "page_table", table, 2)
    _checks.require(op, table.shape[0] > 0 or 0 in q.shape, "page_table has no rows, but q_nope has tokens")
    _checks.shape(op, "kv_lens", lens, (table.shape[0],), "rows of page_table")
    _checks.shape(op, "cu_seqlens_q", cu, (table.shape[0] + 1,), "rows of page_table, plus 1")
    _checks.shape(op, "out", out, q.shape, "as q_nope")
    _checks.same_dtype(op, "out", out, "q_nope", q)
    for name, x in (("q_nope", q), ("q_rope", rope), ("kv_cache", cache), ("out", out)):
        _checks.contiguous_last(op, name, x)


def _workspace(q: Array, cache: Array, table: Array, hint: int, any_split: bool) -> Array | None:
    """Scratch for the native kernel; None when it needs none, or when the shapes are for its checks to refuse."""
    if len(q.shape) != 3 or len(cache.shape) != 3 or len(table.shape) != 2 or cache.shape[1] == 0:
        return None
    assert _loader.bind is not None
    size = _loader.bind.mla_decode_workspace_size(
        q.shape[0], table.shape[0], q.shape[1], cache.shape[1], table.shape[1], hint, any_split
    )
    return _arrays.empty(q, (size,), "uint8") if size else None
