"""Argument checks of attention, shared by the reference and the Triton path."""

from __future__ import annotations

from typing import Any

from . import _checks


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
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), *tables):
        _checks.require(op, x.device == q.device, f"{name} is on {x.device}, q on {q.device}")


def check_scales(op: str, q: Any, k: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> None:
    """ValueError unless FP8 and INT8 tensors, and no others, have their scales, FP8 ones all of one size."""
    int8 = is_int8(k)
    scales = (("k_scale", k_scale, "KV", k), ("v_scale", v_scale, "KV", k), ("q_scale", q_scale, "q", q))
    for name, scale, of, x in scales:
        wanted = is_fp8(x) or (int8 and of == "KV")
        _checks.require(op, wanted or scale is None, f"{name} is given, but {of} is neither FP8 nor INT8")
        _checks.require(op, not wanted or scale is not None, f"{name} is missing, FP8 and INT8 {of} need it")
        if scale is not None:
            _checks.dtype(op, name, scale, ("float32",))
            if int8:
                _checks.shape(op, name, scale, k.shape[:3], "pages, page_size and heads of k_cache")
                continue
            _checks.rank(op, name, scale, 1)
            size = scale.shape[0]
            _checks.require(op, size in (1, k.shape[-2]), f"{name} has {size} elements, expected 1 or KV heads")
            same = k_scale is None or size == k_scale.shape[0]
            _checks.require(op, same, f"{name} and k_scale differ in size")


def is_fp8(x: Any) -> bool:
    """True for a float8_e4m3fn tensor."""
    return str(x.dtype) == "torch.float8_e4m3fn"


def is_int8(x: Any) -> bool:
    """True for an int8 tensor."""
    return str(x.dtype) == "torch.int8"


def check_qkv(op: str, q: Any, k: Any, v: Any, ndim: int, names: tuple[str, str]) -> None:
    """TypeError or ValueError unless queries, keys and values fit together."""
    _checks.dtype(op, "q", q, (*_checks.FLOATS, "float8_e4m3fn"))
    _checks.rank(op, "q", q, 3)
    _checks.contiguous_last(op, "q", q)
    for name, x in zip(names, (k, v), strict=True):
        _checks.rank(op, name, x, ndim)
        _checks.same_dtype(op, name, x, *((names[0], k) if is_fp8(k) or is_int8(k) else ("q", q)))
        _checks.contiguous_last(op, name, x)
        _checks.shape(op, name, x, (*k.shape[:-1], x.shape[-1]), f"as {names[0]} but for the last dimension")
    heads, kv_heads, dim, v_dim = q.shape[1], k.shape[-2], q.shape[2], v.shape[-1]
    _checks.require(
        op,
        kv_heads > 0 and heads % kv_heads == 0,
        f"q has {heads} heads, expected a multiple of the {kv_heads} of {names[0]}",
    )
    _checks.require(op, k.shape[-1] == dim, f"{names[0]} has head dimension {k.shape[-1]}, expected {dim}")
    for name, d in (("q", dim), (names[1], v_dim)):
        _checks.require(
            op, d % 16 == 0 and 0 < d <= 256, f"{name} has head dimension {d}, expected a multiple of 16 up to 256"
        )


def check_options(op: str, q: Any, v: Any, left: int, right: int, softcap: float, sinks: Any, out: Any) -> None:
    """TypeError or ValueError unless window, softcap, sinks and out are valid."""
    _checks.require(
        op, left >= -1 and right in (-1, 0), f"window_size is ({left}, {right}), expected left >= -1 and right -1 or 0"
    )
    _checks.require(op, softcap >= 0, f"softcap is {softcap}, expected at least 0")
    if sinks is not None:
        _checks.dtype(op, "sinks", sinks, ("float32",))
        _checks.shape(op, "sinks", sinks, (q.shape[1],), "query heads")
    _checks.shape(op, "out", out, (*q.shape[:2], v.shape[-1]), "tokens and heads of q, last dimension of v")
    if is_fp8(q):
        _checks.dtype(op, "out", out, ("bfloat16", "float16"))
    else:
        _checks.same_dtype(op, "out", out, "q", q)
    _checks.contiguous_last(op, "out", out)
