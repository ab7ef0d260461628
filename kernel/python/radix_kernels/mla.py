"""Multi-head latent attention over a paged latent cache, in the absorbed form.

DeepSeek-V2, 2024, arXiv:2405.04434: the up-projection of the keys is multiplied into the queries
beforehand and that of the values into the output afterwards, so that all query heads attend to one
latent head.
"""

from __future__ import annotations

import itertools
import math
import numbers
from typing import Any

from . import _arrays, _checks, _dispatch, _loader
from ._arrays import Array
from ._attention_checks import read_max_seqlen_q

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

    q_nope: [T, H, 512] and q_rope: [T, H, 64], bfloat16 or float16; kv_cache: [pages, page_size,
    576] of that dtype: a token's 512 latent values, key and value at once, then its 64 rotary key
    values. Or the FP8 form, uint8 [pages, page_size, 656] (see `FP8_BYTES`). Last dimensions
    contiguous, other strides free. page_table: int32 [B, max_pages]; kv_lens: int32 [B], the new
    tokens included; cu_seqlens_q: int32 [B + 1] from 0 to T; the q tokens of a row are the last of
    its kv tokens, and with `causal` each sees the tokens up to its own. softmax_scale has no
    default: it is that of the model's full head dimension. max_seqlen_q: the most q tokens of a
    row; a hint about speed. batch_invariant: a row's bits depend on its own length alone. Without
    it a long row may be split wherever the work of the batch divides evenly, which is faster, and
    its last bits can move with the other rows.

    Hopper's kernels serve rows at multiples of 16 bytes, the FP8 form for bfloat16 queries; other
    calls and other GPUs run the Triton kernel. Scratch is allocated by the call:
    docs/kernels/mla.md says how much.

    Returns out [T, H, 512] of q's dtype, or (out, lse float32 [T, H], natural log). A query that
    sees nothing gets 0 and -inf. Entries of page_table past ceil(kv_len / page_size) are never
    read, cache slots past kv_len never used. Tolerances: docs/numerics.md. Errors: TypeError
    (dtype, softmax_scale that is no number), ValueError (shape, stride, device; where the reference
    runs, which reads them on the host, also kv_lens, cu_seqlens_q and pages out of range).
    """
    op = "mla_decode"
    scale = _read_scale(op, softmax_scale)
    hint = read_max_seqlen_q(op, max_seqlen_q)
    lse = _arrays.empty(q_nope, tuple(q_nope.shape)[:-1], "float32") if return_softmax_lse else None
    out = _arrays.empty_like(q_nope) if out is None else out
    result = (out, lse) if return_softmax_lse else out

    def call(run: _dispatch.Native, bound: bool) -> None:
        workspace = (
            _workspace(q_nope, kv_cache, page_table, hint, not batch_invariant) if bound else None
        )
        run(
            q_nope, q_rope, kv_cache, page_table, kv_lens, cu_seqlens_q,
            scale, causal, out, lse, workspace, hint, not batch_invariant,
        )  # fmt: skip

    if _dispatch.attempt(op, q_nope, call):
        return result
    from . import reference

    arrays = (q_nope, q_rope, kv_cache, page_table, kv_lens, cu_seqlens_q, out)
    tensors = [_arrays.as_torch(x) for x in arrays]
    check_decode(op, *tensors)
    _check_rows(op, tensors[0].shape[0], *tensors[2:6])
    _, result_lse = reference.mla_decode(
        *tensors[:6], softmax_scale=scale, causal=causal, return_softmax_lse=True, out=tensors[6],
        compute_dtype=reference.float32(),
    )  # fmt: skip
    if lse is not None:
        _arrays.as_torch(lse).copy_(result_lse)
    return result


def store_mla_kv(latent: Array, rope: Array, kv_cache: Array, slot_mapping: Array) -> None:
    """Write token t, its latent values and then its rotary ones, to slot `slot_mapping[t]` of a
    latent cache, in place.

    latent: [T, L] and rope: [T, R], bfloat16 or float16; kv_cache: [pages, page_size, L + R] of
    that dtype, bits are copied. Or the FP8 form of `mla_decode`, uint8 [pages, page_size, 656],
    from bfloat16 with L 512 and R 64: each 128 latent values are divided by `max(largest magnitude,
    1e-10) / 448`, their scale, and rounded to the nearest e4m3. Last dimensions contiguous, other
    strides free. slot_mapping: int64 [T]; slot s is page `s // page_size`, offset `s % page_size`;
    -1 skips the token. Slots are unique, apart from -1 (a slot named twice holds either token).

    vLLM's `concat_and_cache_mla` and SGLang's `set_mla_kv_buffer`. Errors: TypeError (dtype),
    ValueError (shape, stride; on the CPU also a slot outside of -1 .. pages * page_size - 1, before
    anything is written).
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
        _checks.shape(
            op,
            "kv_cache",
            tc,
            (*tc.shape[:2], tl.shape[1] + tr.shape[1]),
            "latent and rotary values",
        )
    _checks.dtype(op, "slot_mapping", slots, ("int64",))
    _checks.shape(op, "slot_mapping", slots, tl.shape[:1], "tokens of latent")
    for name, x in (("latent", tl), ("rope", tr), ("kv_cache", tc)):
        _checks.contiguous_last(op, name, x)
    reference.store_mla_kv(tl, tr, tc, slots)


def concat_mla_k(k: Array, k_nope: Array, k_rope: Array) -> None:
    """Fill the full keys of a prefill, in place: k[t, h] = k_nope[t, h] and then k_rope[t, 0], the
    same for every head.

    k: [T, H, N + R], k_nope: [T, H, N], k_rope: [T, 1, R], all bfloat16 or float16, last dimensions
    contiguous, other strides free. Bits are copied. The op of that name in sgl_kernel, for any N
    and R. Errors: TypeError (dtype), ValueError (shape, stride).
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
    _checks.shape(
        op, "k", tk, (*tn.shape[:2], tn.shape[2] + tr.shape[2]), "as k_nope, with k_rope behind"
    )
    reference.concat_mla_k(tk, tn, tr)


def check_decode(
    op: str, q: Any, rope: Any, cache: Any, table: Any, lens: Any, cu: Any, out: Any
) -> None:
    """TypeError or ValueError unless the tensors of a call of `mla_decode` fit together."""
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
        _checks.shape(
            op, "kv_cache", cache, (*cache.shape[:2], LATENT + ROPE), "latent and rotary values"
        )
    _checks.require(op, cache.shape[1] > 0, "kv_cache has page size 0")
    indices = (("page_table", table), ("kv_lens", lens), ("cu_seqlens_q", cu))
    for name, x in indices:
        _checks.dtype(op, name, x, ("int32",))
    _checks.rank(op, "page_table", table, 2)
    _checks.require(
        op, table.shape[0] > 0 or 0 in q.shape, "page_table has no rows, but q_nope has tokens"
    )
    _checks.shape(op, "kv_lens", lens, (table.shape[0],), "rows of page_table")
    _checks.shape(op, "cu_seqlens_q", cu, (table.shape[0] + 1,), "rows of page_table, plus 1")
    _checks.shape(op, "out", out, q.shape, "as q_nope")
    _checks.same_dtype(op, "out", out, "q_nope", q)
    for name, x in (("q_nope", q), ("q_rope", rope), ("kv_cache", cache), ("out", out), *indices):
        _checks.contiguous_last(op, name, x)
        _checks.require(op, x.device == q.device, f"{name} is on {x.device}, q_nope on {q.device}")


def _check_rows(op: str, tokens: int, cache: Any, table: Any, lens: Any, cu: Any) -> None:
    """ValueError for offsets, lengths and pages that are not there, read on the host."""
    starts, (pages, page_size, _) = cu.tolist(), cache.shape
    _checks.require(op, starts[0] == 0, f"cu_seqlens_q[0] is {starts[0]}, expected 0")
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        text = f"cu_seqlens_q[{row + 1}] is {end}, less than the one before ({begin})"
        _checks.require(op, begin <= end, text)
    _checks.require(
        op, starts[-1] == tokens, f"cu_seqlens_q ends at {starts[-1]}, expected {tokens}"
    )
    capacity = table.shape[1] * page_size
    for row, kv_len in enumerate(lens.tolist()):
        text = f"kv_lens[{row}] is {kv_len}, expected 0 to {capacity} (columns of page_table x page size)"
        _checks.require(op, 0 <= kv_len <= capacity, text)
        for column, page in enumerate(table[row, : -(-kv_len // page_size)].tolist()):
            text = f"page_table[{row}, {column}] is {page}, expected 0 to {pages - 1} (pages of kv_cache)"
            _checks.require(op, 0 <= page < pages, text)


def _read_scale(op: str, scale: float) -> float:
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"{op}: softmax_scale is {scale!r}, expected a number: it has no default")
    _checks.require(op, math.isfinite(scale), f"softmax_scale is {scale}, expected a finite number")
    return float(scale)


def _workspace(q: Array, cache: Array, table: Array, hint: int, any_split: bool) -> Array | None:
    """Scratch for the native kernel; None when it needs none, or when the shapes are for its checks
    to refuse."""
    if len(q.shape) != 3 or len(cache.shape) != 3 or len(table.shape) != 2 or cache.shape[1] == 0:
        return None
    assert _loader.bind is not None
    item_size = 1 if _arrays.dtype_name(cache) == "uint8" else 2
    size = _loader.bind.mla_decode_workspace_size(
        q.shape[0],
        table.shape[0],
        q.shape[1],
        cache.shape[1],
        table.shape[1],
        hint,
        any_split,
        item_size,
    )
    return _arrays.empty(q, (size,), "uint8") if size else None
