"""Attention over a paged or ragged KV cache, and the merge of partial results.

Online softmax: Milakov and Gimelshein, 2018, arXiv:1805.02867; FlashAttention: Dao et al., 2022,
arXiv:2205.14135; paging: Kwon et al., 2023, arXiv:2309.06180.

Common to both attention ops
    softmax_scale   default D ** -0.5
    causal          the q tokens of a row are the last of its k tokens: q token i (of n) sees k
                    tokens 0 .. kv_len - n + i
    window_size     (left, right): at most `left` earlier tokens are seen besides the token at the
                    query's own position (-1, or 2**30 and more: all); right is -1, or 0, which is
                    the same as causal
    softcap         scores become `softcap * tanh(score / softcap)` where it is above 0; finite
    sinks           float32 [Hq]: a logit for each head that joins the softmax with no value
    lse             float32 [T, Hq]: natural log of the sum of exp(scores), sinks included
    empty rows      a query that sees nothing gets out 0 and lse -inf (lse is the sink's logit
                    with sinks)
    max_seqlen_q    the most q tokens that a row has, where the caller knows it on the host. It
                    chooses the kernel, so the last bits, never the result's meaning; without it a
                    batch with as many tokens as rows is taken for decode, any other for rows of up
                    to T tokens

    FP8             k and v may be float8_e4m3fn, whose values stand for `value * scale`; k_scale
                    and v_scale, float32 [1] or [Hkv] and above 0, are then required. So may q with
                    them, with a q_scale of the same size: the query heads of a KV head share a
                    scale. out is then bfloat16, or float16 where the caller gives such an out. On
                    ROCm all of them may be float8_e4m3fnuz instead. Scales lie on the device and
                    are not read by the checks: one of 0 may give NaN

On a Hopper GPU the native kernels serve bfloat16 and float16 tensors whose rows start at multiples
of 16 bytes, an FP8 cache under a few query tokens a row of these, and FP8 alone up to D = 128.
Another call, as any call on another GPU, runs the Triton kernel; without Triton, and on a CPU for
FP8, the reference (see `set_fallback`).

Scores and the softmax are float32; probabilities may be rounded to the value dtype before they meet
the values; the output is rounded once. A row's result depends on no other row of the batch; on a
GPU its bits do not either for one max_seqlen_q (without it the numbers of tokens and rows decide).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _arrays, _dispatch, _loader
from ._arrays import Array, torch_views
from ._checks.attention import (
    check_merge,
    check_options,
    check_paged,
    check_rows,
    check_softcap,
    check_tensors,
    check_varlen,
    read_max_seqlen_q,
    read_window,
)
from ._lazy import reference


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    page_table: Array,
    kv_lens: Array,
    cu_seqlens_q: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    return_softmax_lse: bool = False,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    max_seqlen_q: int | None = None,
    batch_invariant: bool = False,
    out: Array | None = None,
    implementation: str = "auto",
) -> Array:
    """Attention of ragged queries over a paged cache: prefill, decode, or both in one batch.

    q: [T, Hq, D]; k_cache: [pages, page_size, Hkv, D]; v_cache: [pages, page_size, Hkv, Dv]; all of
    one dtype (bfloat16, float16, float32) or FP8, last dimension contiguous, other strides free; Hq
    a multiple of Hkv; D and Dv multiples of 16 up to 256.
    page_table: int32 [B, max_pages]; kv_lens: int32 [B], the new tokens
    included; cu_seqlens_q: int32 [B + 1] from 0 to T. Entries of page_table past
    ceil(kv_len / page_size) are never read, cache slots past kv_len never used.

    INT8 (natively on the CPU alone): the caches may be int8, with scales [pages, page_size, Hkv],
    one per token and head, as `store_kv_cache` writes them.

    batch_invariant: a row's bits depend on its own length alone (and on max_seqlen_q). Without it
    Hopper's decode splits short rows finer where there are few, which is faster, and their last
    bits can move with the number of rows.

    implementation: "auto", or "triton" for Triton's kernel wherever it runs: on a GPU, and on the
    CPU in its interpreter.

    Returns out [T, Hq, Dv] of q's dtype, or (out, lse float32 [T, Hq]). See the module for FP8, the
    keywords and rows that see nothing. Tolerances: docs/numerics.md. Errors: TypeError (dtype, no
    tensor, no integer), ValueError (shape, stride, device, head counts, window, soft cap, queries
    without a row, implementation), RuntimeError (Triton is asked for and not installed).
    """
    op = "flash_attn_with_kvcache"
    check_tensors(op, q=q, k_cache=k_cache, v_cache=v_cache, page_table=page_table)
    check_rows(op, q, page_table.shape[0])
    check_softcap(op, softcap)
    left, right = read_window(op, window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _outputs(q, v_cache, out, return_softmax_lse)
    hint = read_max_seqlen_q(op, max_seqlen_q)

    def call(run: _dispatch.Native, workspace: Array | None) -> None:
        run(
            q, k_cache, v_cache, page_table, kv_lens, cu_seqlens_q,
            scale, causal, left, right, softcap, sinks, out, lse,
            k_scale, v_scale, workspace, hint, q_scale, not batch_invariant,
        )  # fmt: skip

    if _run(op, q, call, k_cache, page_table.shape, hint, implementation):
        return _result(out, lse)
    tensors = torch_views(q, k_cache, v_cache, page_table, kv_lens, cu_seqlens_q)
    scales = torch_views(q_scale, k_scale, v_scale)
    sink_logits, target = torch_views(sinks, out)
    check_paged(op, *tensors, *scales)
    check_options(op, tensors[0], tensors[2], sink_logits, target)
    options = _reference_options(scale, causal, (left, right), softcap, scales)
    _, sums = reference.flash_attn_with_kvcache(*tensors, sinks=sink_logits, out=target, **options)
    return _result(out, lse, sums)


def flash_attn_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    return_softmax_lse: bool = False,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    max_seqlen_q: int | None = None,
    out: Array | None = None,
) -> Array:
    """Attention over ragged contiguous keys and values.

    q: [T, Hq, D]; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv]; cu_seqlens_q, cu_seqlens_k: int32 [B + 1].
    Everything else as `flash_attn_with_kvcache`.
    """
    op = "flash_attn_varlen"
    check_tensors(op, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    check_rows(op, q, cu_seqlens_q.shape[0] - 1)
    check_softcap(op, softcap)
    left, right = read_window(op, window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _outputs(q, v, out, return_softmax_lse)
    hint = read_max_seqlen_q(op, max_seqlen_q)

    def call(run: _dispatch.Native, workspace: Array | None) -> None:
        run(
            q, k, v, cu_seqlens_q, cu_seqlens_k,
            scale, causal, left, right, softcap, sinks, out, lse,
            k_scale, v_scale, workspace, hint, q_scale,
        )  # fmt: skip

    if _run(op, q, call, k, (cu_seqlens_q.shape[0] - 1, 0), hint):
        return _result(out, lse)
    tensors = torch_views(q, k, v, cu_seqlens_q, cu_seqlens_k)
    scales = torch_views(q_scale, k_scale, v_scale)
    sink_logits, target = torch_views(sinks, out)
    check_varlen(op, *tensors, *scales)
    check_options(op, tensors[0], tensors[2], sink_logits, target)
    options = _reference_options(scale, causal, (left, right), softcap, scales)
    _, sums = reference.flash_attn_varlen(*tensors, sinks=sink_logits, out=target, **options)
    return _result(out, lse, sums)


def _result(out: Array, lse: Array | None, sums: Any = None) -> Any:
    """What a call returns; `sums`, where they are given, become those of lse."""
    if lse is None:
        return out
    if sums is not None:
        _arrays.as_torch(lse).copy_(sums)
    return out, lse


def merge_state(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
) -> tuple[Array, Array]:
    """Join the attention of one query over two disjoint sets of keys.

    out_a, out_b: [T, H, D] of one dtype; lse_a, lse_b: float32 [T, H], natural log, -inf for a
    side that saw nothing (its out is not used). Returns (out, lse); out and lse may be side a's.
    At most one side may include sinks. Errors: TypeError, ValueError.
    """
    op = "merge_state"
    out = _arrays.empty_like(out_a) if out is None else out
    lse = _arrays.empty_like(lse_a) if lse is None else lse
    run = _dispatch.native(op, out_a)
    if run is not None:
        run(out_a, lse_a, out_b, lse_b, out, lse)
        return out, lse
    a, a_sums, b, b_sums, target, sums = torch_views(out_a, lse_a, out_b, lse_b, out, lse)
    check_merge(op, a, a_sums, b, b_sums, target, sums)
    reference.merge_state(
        a, a_sums, b, b_sums, out=target, lse=sums, compute_dtype=reference.float32()
    )
    return out, lse


def _outputs(q: Array, v: Array, out: Array | None, with_lse: bool) -> tuple[Array, Array | None]:
    shape = tuple(q.shape)[:-1]
    lse = _arrays.empty(q, shape, "float32") if with_lse else None
    if out is not None:
        return out, lse
    if _arrays.dtype_name(q).startswith("float8"):
        return _arrays.empty(q, (*shape, v.shape[-1]), "bfloat16"), lse
    if q.shape[-1] == v.shape[-1]:
        return _arrays.empty_like(q), lse
    return _arrays.empty(q, (*shape, v.shape[-1])), lse


def _reference_options(
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    scales: tuple[Any, Any, Any],
) -> dict[str, Any]:
    """The keywords that both references take."""
    q_scale, k_scale, v_scale = scales
    return {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": window,
        "softcap": softcap,
        "return_softmax_lse": True,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "compute_dtype": reference.float32(),
    }


def _run(
    op: str,
    q: Array,
    call: Callable[[_dispatch.Native, Array | None], None],
    k: Array,
    table: tuple[int, int],
    hint: int,
    implementation: str = "auto",
) -> bool:
    """Runs the native kernel or, where there is none or it refuses the call, the Triton kernel; by
    name the implementation that is asked for.

    table: the page table's shape, or (batch, 0). False: the caller runs the reference.
    """
    if implementation != "auto":
        call(_dispatch.implementation(op, implementation), None)
        return True

    def with_workspace(run: _dispatch.Native, bound: bool) -> None:
        call(run, _workspace(q, k, table, hint) if bound else None)

    return _dispatch.attempt(op, q, with_workspace)


def _workspace(q: Array, k: Array, table: tuple[int, int], hint: int) -> Array | None:
    """Scratch for the native kernel; None when it needs none, or when the shapes are for its checks
    to refuse."""
    if len(q.shape) != 3 or len(k.shape) < 3 or len(table) != 2:
        return None
    page_size = k.shape[1] if len(k.shape) == 4 else 0
    assert _loader.bind is not None
    size = _loader.bind.flash_attn_workspace_size(
        q.shape[0], table[0], q.shape[1], k.shape[-2], q.shape[2], page_size, table[1], hint
    )
    return _arrays.empty(q, (size,), "uint8") if size else None
