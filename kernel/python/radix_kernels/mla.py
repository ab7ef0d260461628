"""Multi-head latent attention over a paged latent cache, in the absorbed form.

DeepSeek-V2, 2024, arXiv:2405.04434: the up-projection of the keys is multiplied into the queries
beforehand and that of the values into the output afterwards, so that all query heads attend to one
latent head.
"""

from __future__ import annotations

from . import _arrays, _dispatch, _loader
from ._arrays import Array, torch_views
from ._checks.attention import read_max_seqlen_q
from ._checks.mla import (
    check_concat,
    check_decode,
    check_gather,
    check_gathered_rows,
    check_rows,
    check_store,
    read_scale,
)
from ._lazy import reference


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

    q_nope: [T, H, L] and q_rope: [T, H, R], bfloat16, float16 or float32; L is a multiple of 16 up
    to 512 (512 in most models), R one up to 64. kv_cache: [pages, page_size, L + R] of that dtype:
    a token's L latent values, key and value at once, then its R rotary key values. Or, with L 512,
    R 64 and 16-bit queries, the FP8 form, uint8 [pages, page_size, 656]: 512 e4m3, 4 float32 scales
    of 128 values each, 64 bfloat16. Last dimensions contiguous, other strides free. page_table:
    int32 [B, max_pages]; kv_lens: int32 [B], the new tokens included; cu_seqlens_q: int32 [B + 1]
    from 0 to T; the q tokens of a row are the last of its kv tokens, and with `causal` each sees
    the tokens up to its own. softmax_scale has no default: it is that of the model's full head
    dimension. max_seqlen_q: the most q tokens of a row; a hint about speed. batch_invariant: a
    row's bits depend on its own length alone. Without it a long row may be split wherever the work
    of the batch divides evenly, which is faster, and its last bits can move with the other rows.

    Hopper's kernels serve 16 bits with L 512 and R 64, rows at multiples of 16 bytes, the FP8 form
    for bfloat16 queries; other calls and other GPUs run the Triton kernel, which takes 16 bits with
    L 256 or 512 and R 64. The CPU's serves all but the FP8 form. Scratch is allocated by the call:
    docs/kernels/mla.md says how much.

    Returns out [T, H, L] of q's dtype, or (out, lse float32 [T, H], natural log). A query that
    sees nothing gets 0 and -inf. Entries of page_table past ceil(kv_len / page_size) are never
    read, cache slots past kv_len never used. Tolerances: docs/numerics.md. Errors: TypeError
    (dtype, softmax_scale that is no number), ValueError (shape, stride, device; where the reference
    runs, which reads them on the host, also kv_lens, cu_seqlens_q and pages out of range).
    """
    op = "mla_decode"
    scale = read_scale(op, softmax_scale)
    hint = read_max_seqlen_q(op, max_seqlen_q)
    any_split = not batch_invariant
    lse = (
        _arrays.empty(q_nope, _arrays.shape(q_nope)[:-1], "float32") if return_softmax_lse else None
    )
    out = _arrays.empty_like(q_nope) if out is None else out
    result = (out, lse) if return_softmax_lse else out

    def call(run: _dispatch.Native, bound: bool) -> None:
        workspace = None
        if bound:
            workspace = _workspace(q_nope, kv_cache, page_table, hint, any_split)
        run(
            q_nope, q_rope, kv_cache, page_table, kv_lens, cu_seqlens_q,
            scale, causal, out, lse, workspace, hint, any_split,
        )  # fmt: skip

    if _dispatch.attempt(op, q_nope, call):
        return result
    q, rope, cache, target = torch_views(q_nope, q_rope, kv_cache, out)
    table, lens, starts = torch_views(page_table, kv_lens, cu_seqlens_q)
    check_decode(op, q, rope, cache, table, lens, starts, target)
    check_rows(op, q.shape[0], cache, table, lens, starts)
    _, sums = reference.mla_decode(
        q, rope, cache, table, lens, starts,
        softmax_scale=scale, causal=causal, return_softmax_lse=True, out=target,
        compute_dtype=reference.float32(),
    )  # fmt: skip
    if lse is not None:
        _arrays.as_torch(lse).copy_(sums)
    return result


def store_mla_kv(latent: Array, rope: Array, kv_cache: Array, slot_mapping: Array) -> None:
    """Write token t, its latent values and then its rotary ones, to slot `slot_mapping[t]` of a
    latent cache, in place.

    latent: [T, L] and rope: [T, R], bfloat16, float16 or float32; kv_cache: [pages, page_size, L +
    R] of that dtype, bits are copied. Or the FP8 form of `mla_decode`, uint8 [pages, page_size,
    656], from bfloat16 with L 512 and R 64: each 128 latent values are divided by `max(largest
    magnitude, 1e-10) / 448`, their scale, and rounded to the nearest e4m3. Last dimensions
    contiguous, other strides free. slot_mapping: int64 [T]; slot s is page `s // page_size`, offset
    `s % page_size`; -1 skips the token. Slots are unique, apart from -1 (a slot named twice holds
    either token).

    vLLM's `concat_and_cache_mla` and SGLang's `set_mla_kv_buffer`. Errors: TypeError (dtype),
    ValueError (shape, stride; on the CPU also a slot outside of -1 .. pages * page_size - 1, before
    anything is written).
    """
    op = "store_mla_kv"
    call = (latent, rope, kv_cache, slot_mapping)
    if _dispatch.attempt(op, latent, lambda run, bound: run(*call)):
        return
    tensors = torch_views(*call)
    check_store(op, *tensors)
    reference.store_mla_kv(*tensors)


def gather_mla_kv(
    kv_cache: Array,
    page_table: Array,
    cu_seqlens: Array,
    out: Array,
    *,
    starts: Array | None = None,
) -> Array:
    """Copy cached tokens of several rows into one tensor, row after row: what a prefill over cached
    latents expands.

    out: [N, L + R], bfloat16, float16 or float32; kv_cache: [pages, page_size, L + R] of that
    dtype, bits are copied. Or the FP8 form of `mla_decode`, uint8 [pages, page_size, 656], to
    bfloat16 [N, 576]: a value times its scale, rounded to the nearest. Last dimensions contiguous,
    other strides free. page_table: int32 [B, max_pages]; cu_seqlens: int32 [B + 1] from 0 to N: row
    b's tokens are out[cu_seqlens[b] : cu_seqlens[b + 1]], from position starts[b] of the row on, an
    int32 [B]; None: from its first.

    Returns out. vLLM's `cp_gather_cache` and `gather_and_maybe_dequant_cache`. Errors: TypeError
    (dtype), ValueError (shape, stride; on the CPU also positions and pages out of range, before
    anything is written; on a GPU their tokens become zeros).
    """
    op = "gather_mla_kv"
    call = (kv_cache, page_table, cu_seqlens, starts, out)
    if _dispatch.attempt(op, kv_cache, lambda run, bound: run(*call)):
        return out
    cache, table, ends, firsts, target = torch_views(*call)
    check_gather(op, cache, table, ends, firsts, target)
    check_gathered_rows(op, cache, table, ends, firsts, target)
    reference.gather_mla_kv(cache, table, ends, target, starts=firsts)
    return out


def concat_mla_k(k: Array, k_nope: Array, k_rope: Array) -> None:
    """Fill the full keys of a prefill, in place: k[t, h] = k_nope[t, h] and then k_rope[t, 0], the
    same for every head.

    k: [T, H, N + R], k_nope: [T, H, N], k_rope: [T, 1, R], all bfloat16, float16 or float32, last
    dimensions contiguous, other strides free. Bits are copied. The op of that name in sgl_kernel,
    for any N and R. Errors: TypeError (dtype), ValueError (shape, stride).
    """
    op = "concat_mla_k"
    call = (k, k_nope, k_rope)
    if _dispatch.attempt(op, k_nope, lambda run, bound: run(*call)):
        return
    tensors = torch_views(*call)
    check_concat(op, *tensors)
    reference.concat_mla_k(*tensors)


def _workspace(q: Array, cache: Array, table: Array, hint: int, any_split: bool) -> Array | None:
    """Scratch for the native kernel; None when it needs none, or when the shapes are for its checks
    to refuse."""
    try:
        ranks = len(q.shape), len(cache.shape), len(table.shape)
    except AttributeError:  # one is no tensor
        return None
    if ranks != (3, 3, 2) or cache.shape[1] == 0:
        return None
    assert _loader.bind is not None
    item_size = 1 if _arrays.dtype_name(cache) == "uint8" else 2  # float32 has no kernel with one
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
