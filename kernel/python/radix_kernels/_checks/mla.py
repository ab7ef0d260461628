"""Argument checks of multi-head latent attention, for the reference and Triton."""

from __future__ import annotations

import itertools
import math
import numbers
from typing import Any

from .. import _checks
from .._arrays import dtype_name

MAX_LATENT = 512
MAX_ROPE = 64
FP8_BYTES = 656  # of a token: 512 e4m3, 4 float32 scales of 128 values each, 64 bfloat16
_SIZES = ((MAX_LATENT, "q_nope"), (MAX_ROPE, "q_rope"))


def read_scale(op: str, scale: float) -> float:
    """The scale as a float. TypeError unless it is a number, ValueError unless it is finite."""
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"{op}: softmax_scale is {scale!r}, expected a number: it has no default")
    _checks.require(op, math.isfinite(scale), f"softmax_scale is {scale}, expected a finite number")
    return float(scale)


def check_decode(
    op: str, q: Any, rope: Any, cache: Any, table: Any, lens: Any, cu: Any, out: Any
) -> None:
    """TypeError or ValueError unless the tensors of a call of `mla_decode` fit together."""
    _checks.dtype(op, "q_nope", q, _checks.FLOATS)
    _checks.rank(op, "q_nope", q, 3)
    _checks.same_dtype(op, "q_rope", rope, "q_nope", q)
    _checks.rank(op, "q_rope", rope, 3)
    size = rope.shape[-1]
    _checks.shape(op, "q_rope", rope, (*q.shape[:2], size), "tokens and heads of q_nope")
    for (most, name), x in zip(_SIZES, (q, rope), strict=True):
        _checks.require(
            op,
            x.shape[-1] % 16 == 0 and 0 < x.shape[-1] <= most,
            f"{name} has last dimension {x.shape[-1]}, expected a multiple of 16 up to {most}",
        )
    _checks.rank(op, "kv_cache", cache, 3)
    if dtype_name(cache) == "uint8":
        _checks.shape(op, "kv_cache", cache, (*cache.shape[:2], FP8_BYTES), "bytes of an FP8 token")
        _checks.dtype(op, "q_nope", q, _checks.HALVES)
        _checks.shape(op, "q_nope", q, (*q.shape[:2], MAX_LATENT), "latent size of an FP8 token")
        _checks.shape(op, "q_rope", rope, (*q.shape[:2], MAX_ROPE), "rotary size of an FP8 token")
    else:
        _checks.same_dtype(op, "kv_cache", cache, "q_nope", q)
        _checks.shape(
            op,
            "kv_cache",
            cache,
            (*cache.shape[:2], q.shape[-1] + size),
            "latent and rotary values",
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


def check_rows(op: str, tokens: int, cache: Any, table: Any, lens: Any, cu: Any) -> None:
    """ValueError for offsets, lengths and pages that are not there, read on the host."""
    starts = cu.tolist()
    pages, page_size, _ = cache.shape
    _check_offsets(op, "cu_seqlens_q", starts, tokens)
    capacity = table.shape[1] * page_size
    for row, kv_len in enumerate(lens.tolist()):
        _checks.require(
            op,
            0 <= kv_len <= capacity,
            f"kv_lens[{row}] is {kv_len}, expected 0 to {capacity} "
            "(columns of page_table x page size)",
        )
        _check_pages(op, row, table, range(-(-kv_len // page_size)), pages)


def check_store(op: str, latent: Any, rope: Any, cache: Any, slots: Any) -> None:
    """TypeError or ValueError unless the tensors of `store_mla_kv` fit together."""
    _checks.dtype(op, "latent", latent, _checks.FLOATS)
    _checks.rank(op, "latent", latent, 2)
    tokens, latent_size = latent.shape
    _checks.same_dtype(op, "rope", rope, "latent", latent)
    _checks.rank(op, "rope", rope, 2)
    _checks.shape(op, "rope", rope, (tokens, rope.shape[1]), "tokens of latent")
    _checks.rank(op, "kv_cache", cache, 3)
    if dtype_name(cache) == "uint8":
        _checks.dtype(op, "latent", latent, ("bfloat16",))
        _checks.shape(op, "kv_cache", cache, (*cache.shape[:2], FP8_BYTES), "bytes of an FP8 token")
        _checks.shape(op, "latent", latent, (tokens, MAX_LATENT), "latent size of an FP8 token")
        _checks.shape(op, "rope", rope, (tokens, MAX_ROPE), "rotary size of an FP8 token")
    else:
        _checks.same_dtype(op, "kv_cache", cache, "latent", latent)
        expected = (*cache.shape[:2], latent_size + rope.shape[1])
        _checks.shape(op, "kv_cache", cache, expected, "latent and rotary values")
    _checks.dtype(op, "slot_mapping", slots, ("int64",))
    _checks.shape(op, "slot_mapping", slots, (tokens,), "tokens of latent")
    for name, x in (("latent", latent), ("rope", rope), ("kv_cache", cache)):
        _checks.contiguous_last(op, name, x)


def check_gather(op: str, cache: Any, table: Any, cu: Any, starts: Any, out: Any) -> None:
    """TypeError or ValueError unless the tensors of `gather_mla_kv` fit together."""
    _checks.dtype(op, "out", out, _checks.FLOATS)
    _checks.rank(op, "out", out, 2)
    tokens = out.shape[0]
    _checks.rank(op, "kv_cache", cache, 3)
    if dtype_name(cache) == "uint8":
        _checks.dtype(op, "out", out, ("bfloat16",))
        _checks.shape(op, "kv_cache", cache, (*cache.shape[:2], FP8_BYTES), "bytes of an FP8 token")
        width = MAX_LATENT + MAX_ROPE
        _checks.shape(op, "out", out, (tokens, width), "values of an FP8 token")
    else:
        _checks.same_dtype(op, "kv_cache", cache, "out", out)
        _checks.shape(op, "out", out, (tokens, cache.shape[2]), "values of a token")
    _checks.require(op, cache.shape[1] > 0, "kv_cache has page size 0")
    _checks.dtype(op, "page_table", table, ("int32",))
    _checks.rank(op, "page_table", table, 2)
    rows = table.shape[0]
    _checks.dtype(op, "cu_seqlens", cu, ("int32",))
    _checks.shape(op, "cu_seqlens", cu, (rows + 1,), "rows of page_table, plus 1")
    if starts is not None:
        _checks.dtype(op, "starts", starts, ("int32",))
        _checks.shape(op, "starts", starts, (rows,), "rows of page_table")
    _checks.require(op, rows > 0 or tokens == 0, "page_table has no rows, but out has tokens")
    for name, x in (("kv_cache", cache), ("page_table", table), ("out", out)):
        _checks.contiguous_last(op, name, x)


def check_gathered_rows(op: str, cache: Any, table: Any, cu: Any, starts: Any, out: Any) -> None:
    """ValueError for offsets, positions and pages that are not there, read on the host."""
    ends = cu.tolist()
    firsts = [0] * table.shape[0] if starts is None else starts.tolist()
    pages, page_size, _ = cache.shape
    capacity = table.shape[1] * page_size
    _check_offsets(op, "cu_seqlens", ends, out.shape[0])
    for row, (first, (begin, end)) in enumerate(zip(firsts, itertools.pairwise(ends), strict=True)):
        last = first + end - begin
        _checks.require(
            op,
            0 <= first and last <= capacity,
            f"row {row} has positions {first} to {last}, expected 0 to {capacity} "
            "(columns of page_table x page size)",
        )
        if first < last:
            _check_pages(op, row, table, range(first // page_size, -(-last // page_size)), pages)


def _check_offsets(op: str, name: str, starts: list[int], total: int) -> None:
    _checks.require(op, starts[0] == 0, f"{name}[0] is {starts[0]}, expected 0")
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        text = f"{name}[{row + 1}] is {end}, less than the one before ({begin})"
        _checks.require(op, begin <= end, text)
    _checks.require(op, starts[-1] == total, f"{name} ends at {starts[-1]}, expected {total}")


def _check_pages(op: str, row: int, table: Any, columns: range, pages: int) -> None:
    found = table[row, columns.start : columns.stop].tolist()
    for column, page in zip(columns, found, strict=True):
        _checks.require(
            op,
            0 <= page < pages,
            f"page_table[{row}, {column}] is {page}, expected 0 to {pages - 1} (pages of kv_cache)",
        )


def check_concat(op: str, k: Any, k_nope: Any, k_rope: Any) -> None:
    """TypeError or ValueError unless the tensors of `concat_mla_k` fit together."""
    _checks.dtype(op, "k_nope", k_nope, _checks.FLOATS)
    for name, x in (("k_nope", k_nope), ("k_rope", k_rope), ("k", k)):
        _checks.same_dtype(op, name, x, "k_nope", k_nope)
        _checks.rank(op, name, x, 3)
        _checks.contiguous_last(op, name, x)
    tokens, heads, nope_size = k_nope.shape
    rope_size = k_rope.shape[2]
    _checks.shape(op, "k_rope", k_rope, (tokens, 1, rope_size), "tokens of k_nope, one head")
    expected = (tokens, heads, nope_size + rope_size)
    _checks.shape(op, "k", k, expected, "as k_nope, with k_rope behind")
