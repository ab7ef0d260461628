"""Argument checks of attention, for the reference and Triton."""

from __future__ import annotations

import operator
from typing import Any

from .. import _checks

# A window of as many tokens is none: no row is as long, and the kernels' 32-bit positions do not
# overflow.
_ENDLESS = 2**30


def read_window(op: str, window_size: tuple[int, int]) -> tuple[int, int]:
    """(left, right) as integers, -1 for a left of 2**30 or more. TypeError, ValueError unless it is
    a valid pair."""
    try:
        given_left, given_right = window_size
        left = operator.index(given_left)
        right = operator.index(given_right)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: window_size is {window_size!r}, expected two integers") from None
    fits = left >= -1 and right in (-1, 0)
    _checks.require(
        op, fits, f"window_size is ({left}, {right}), expected left >= -1 and right -1 or 0"
    )
    return (left if left < _ENDLESS else -1), right


def read_max_seqlen_q(op: str, max_seqlen_q: int | None) -> int:
    """The hint, 0 for None. TypeError unless it is an integer, ValueError when it is below 0."""
    if max_seqlen_q is None:
        return 0
    try:
        hint = operator.index(max_seqlen_q)
    except TypeError:
        raise TypeError(
            f"{op}: max_seqlen_q is {max_seqlen_q!r}, expected an integer or None"
        ) from None
    _checks.require(op, hint >= 0, f"max_seqlen_q is {hint}, expected 0 or more")
    return hint


def check_tensors(op: str, **tensors: Any) -> None:
    """TypeError where one is no tensor: what is read of them before the library checks them."""
    for name, x in tensors.items():
        if not hasattr(x, "dtype"):
            raise TypeError(f"{op}: {name} is {type(x).__name__}, expected a tensor")


def check_rows(op: str, q: Any, rows: int) -> None:
    """ValueError where there are queries but no row that they could belong to."""
    _checks.require(
        op, rows > 0 or q.shape[0] == 0, f"q has {q.shape[0]} tokens, but there are no rows"
    )


def check_paged(
    op: str,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    kv_lens: Any,
    cu_seqlens_q: Any,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """TypeError or ValueError unless the tensors of a paged call fit together."""
    check_scales(op, q, k_cache, q_scale, k_scale, v_scale)
    check_qkv(op, q, k_cache, v_cache, 4, ("k_cache", "v_cache"))
    tables = (("page_table", page_table), ("kv_lens", kv_lens), ("cu_seqlens_q", cu_seqlens_q))
    for name, x in tables:
        _checks.dtype(op, name, x, ("int32",))
        _checks.contiguous_last(op, name, x)
    _checks.rank(op, "page_table", page_table, 2)
    rows = page_table.shape[0]
    _checks.shape(op, "kv_lens", kv_lens, (rows,), "rows of page_table")
    _checks.shape(op, "cu_seqlens_q", cu_seqlens_q, (rows + 1,), "rows of page_table, plus 1")
    _same_device(op, q, ("k_cache", k_cache), ("v_cache", v_cache), *tables)
    check_rows(op, q, rows)


def check_varlen(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """TypeError or ValueError unless the tensors of a ragged call fit together."""
    check_qkv(op, q, k, v, 3, ("k", "v"))
    if is_int8(k):
        raise TypeError(f"{op}: k is int8: INT8 keys and values need a paged cache")
    check_scales(op, q, k, q_scale, k_scale, v_scale)
    lengths = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    for name, x in lengths:
        _checks.dtype(op, name, x, ("int32",))
        _checks.rank(op, name, x, 1)
        _checks.contiguous_last(op, name, x)
    _checks.require(op, cu_seqlens_q.shape[0] > 0, "cu_seqlens_q is empty, expected [batch + 1]")
    _checks.shape(op, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, "as cu_seqlens_q")
    _same_device(op, q, ("k", k), ("v", v), *lengths)
    check_rows(op, q, cu_seqlens_q.shape[0] - 1)


def _same_device(op: str, q: Any, *others: tuple[str, Any]) -> None:
    for name, x in others:
        _checks.require(op, x.device == q.device, f"{name} is on {x.device}, q on {q.device}")


def check_scales(op: str, q: Any, k: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> None:
    """ValueError unless FP8 and INT8 tensors, and no others, have their scales, FP8 ones all of one
    size."""
    scales = (
        ("k_scale", k_scale, "KV", is_scaled(k)),
        ("v_scale", v_scale, "KV", is_scaled(k)),
        ("q_scale", q_scale, "q", is_fp8(q)),
    )
    for name, scale, of, wanted in scales:
        if scale is None:
            _checks.require(op, not wanted, f"{name} is missing, FP8 and INT8 {of} need it")
            continue
        _checks.require(op, wanted, f"{name} is given, but {of} is neither FP8 nor INT8")
        check_scale(op, name, scale, "k_cache", k)
        _same_device(op, q, (name, scale))
        if not is_int8(k):
            _checks.contiguous_last(op, name, scale)
            same = k_scale is None or scale.shape[0] == k_scale.shape[0]
            _checks.require(op, same, f"{name} and k_scale differ in size")


def check_scale(op: str, name: str, scale: Any, cache_name: str, cache: Any) -> None:
    """TypeError or ValueError unless scale is float32, of each slot and head of an INT8 cache, or
    of a head or all heads of an FP8 one."""
    _checks.dtype(op, name, scale, ("float32",))
    if is_int8(cache):
        _checks.shape(
            op, name, scale, cache.shape[:3], f"pages, page_size and heads of {cache_name}"
        )
        return
    _checks.rank(op, name, scale, 1)
    size = scale.shape[0]
    _checks.require(
        op, size in (1, cache.shape[-2]), f"{name} has {size} elements, expected 1 or KV heads"
    )


def is_fp8(x: Any) -> bool:
    """True for a tensor of e4m3 numbers, OCP's or AMD's (fnuz)."""
    return str(x.dtype).removeprefix("torch.") in _checks.FP8


def is_int8(x: Any) -> bool:
    """True for an int8 tensor."""
    return str(x.dtype) == "torch.int8"


def is_scaled(x: Any) -> bool:
    """True for keys that have scales."""
    return is_fp8(x) or is_int8(x)


def check_qkv(op: str, q: Any, k: Any, v: Any, ndim: int, names: tuple[str, str]) -> None:
    """TypeError or ValueError unless queries, keys and values fit together."""
    _checks.dtype(op, "q", q, (*_checks.FLOATS, *_checks.FP8))
    _checks.rank(op, "q", q, 3)
    _checks.contiguous_last(op, "q", q)
    for name, x in zip(names, (k, v), strict=True):
        _checks.rank(op, name, x, ndim)
        if is_scaled(k) and not is_fp8(q):
            _checks.same_dtype(op, name, x, names[0], k)
        else:
            _checks.same_dtype(op, name, x, "q", q)
        _checks.contiguous_last(op, name, x)
        _checks.shape(
            op, name, x, (*k.shape[:-1], x.shape[-1]), f"as {names[0]} but for the last dimension"
        )
    _, heads, dim = q.shape
    kv_heads = k.shape[-2]
    _checks.require(
        op,
        kv_heads > 0 and heads % kv_heads == 0,
        f"q has {heads} heads, expected a multiple of the {kv_heads} of {names[0]}",
    )
    _checks.require(
        op, k.shape[-1] == dim, f"{names[0]} has head dimension {k.shape[-1]}, expected {dim}"
    )
    for name, size in (("q", dim), (names[1], v.shape[-1])):
        _checks.require(
            op,
            size % 16 == 0 and 0 < size <= 256,
            f"{name} has head dimension {size}, expected a multiple of 16 up to 256",
        )


def check_merge(
    op: str, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any
) -> None:
    """TypeError or ValueError unless the tensors of `merge_state` fit together."""
    _checks.rank(op, "out_a", out_a, 3)
    for name, x in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        _checks.dtype(op, name, x, _checks.FLOATS)
        _checks.shape(op, name, x, out_a.shape, "as out_a")
        _checks.same_dtype(op, name, x, "out_a", out_a)
    for name, x in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        _checks.dtype(op, name, x, ("float32",))
        _checks.shape(op, name, x, out_a.shape[:2], "tokens and heads of out_a")


def check_options(op: str, q: Any, v: Any, sinks: Any, out: Any) -> None:
    """TypeError or ValueError unless sinks and out are valid."""
    if sinks is not None:
        _checks.dtype(op, "sinks", sinks, ("float32",))
        _checks.shape(op, "sinks", sinks, (q.shape[1],), "query heads")
        _checks.contiguous_last(op, "sinks", sinks)
        _same_device(op, q, ("sinks", sinks))
    _checks.shape(
        op, "out", out, (*q.shape[:2], v.shape[-1]), "tokens and heads of q, last dimension of v"
    )
    if is_fp8(q):
        _checks.dtype(op, "out", out, ("bfloat16", "float16"))
    else:
        _checks.same_dtype(op, "out", out, "q", q)
    _checks.contiguous_last(op, "out", out)
    _same_device(op, q, ("out", out))


def check_softcap(op: str, softcap: float) -> None:
    """ValueError unless it is 0 (off) or a positive number that is finite in float32."""
    fits = 0 <= softcap < 2.0**128
    _checks.require(op, fits, f"softcap is {softcap}, expected 0 (off) or a positive finite number")
