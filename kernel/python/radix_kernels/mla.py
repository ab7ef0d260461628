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
    out: Array | None = None,
) -> Array:
    """Attention of a few query tokens a row over a paged latent cache.

    q_nope: [T, H, 512] and q_rope: [T, H, 64], bfloat16 or float16; kv_cache: [pages, page_size, 576] of that dtype: a
    token's 512 latent values, key and value at once, then its 64 rotary key values. Or the FP8 form, uint8 [pages,
    page_size, 656] (see `FP8_BYTES`). Last dimensions contiguous, other strides free. page_table: int32 [B, max_pages];
    kv_lens: int32 [B], the new tokens included; cu_seqlens_q: int32 [B + 1] from 0 to T; the q tokens of a row are the
    last of its kv tokens, and with `causal` each sees the tokens up to its own. softmax_scale has no default: it is
    that of the model's full head dimension. max_seqlen_q: the most q tokens of a row; a hint about speed.

    Returns out [T, H, 512] of q's dtype, or (out, lse float32 [T, H], natural log). A query that sees nothing gets 0
    and -inf. Entries of page_table past ceil(kv_len / page_size) are never read, cache slots past kv_len never used. A
    row's result depends on no other row of the batch. Tolerances: docs/numerics.md.
    Errors: TypeError (dtype), ValueError (shape, stride).
    """
    op = "mla_decode"
    _checks.require(
        op, max_seqlen_q is None or max_seqlen_q >= 0, f"max_seqlen_q is {max_seqlen_q}, expected 0 or more"
    )
    lse = _arrays.empty(q_nope, tuple(q_nope.shape)[:-1], "float32") if return_softmax_lse else None
    out = _arrays.empty_like(q_nope) if out is None else out
    result = (out, lse) if return_softmax_lse else out
    run = _dispatch.native(op, q_nope)
    if run is not None:
        try:
            workspace = _workspace(q_nope, kv_cache, page_table, max_seqlen_q or 0)
            run(
                q_nope, q_rope, kv_cache, page_table, kv_lens, cu_seqlens_q,
                softmax_scale, causal, out, lse, workspace, max_seqlen_q or 0,
            )  # fmt: skip
            return result
        except NotImplementedError as refusal:
            _dispatch.fallback(op, q_nope, run, str(refusal))
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
    _checks.shape(op, "kv_lens", lens, (table.shape[0],), "rows of page_table")
    _checks.shape(op, "cu_seqlens_q", cu, (table.shape[0] + 1,), "rows of page_table, plus 1")
    _checks.shape(op, "out", out, q.shape, "as q_nope")
    _checks.same_dtype(op, "out", out, "q_nope", q)
    for name, x in (("q_nope", q), ("q_rope", rope), ("kv_cache", cache), ("out", out)):
        _checks.contiguous_last(op, name, x)


def _workspace(q: Array, cache: Array, table: Array, hint: int) -> Array | None:
    """Scratch for the native kernel; None when it needs none, or when the shapes are for its checks to refuse."""
    if len(q.shape) != 3 or len(cache.shape) != 3 or len(table.shape) != 2 or cache.shape[1] == 0:
        return None
    assert _loader.bind is not None
    size = _loader.bind.mla_decode_workspace_size(
        q.shape[0], table.shape[0], q.shape[1], cache.shape[1], table.shape[1], hint
    )
    return _arrays.empty(q, (size,), "uint8") if size else None
