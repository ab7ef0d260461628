"""Argument checks of the ops between two calls of a model, for the reference."""

from __future__ import annotations

from typing import Any

from .. import _checks


def check_fill(
    op: str,
    entries: Any,
    tokens: Any,
    sample_tokens: Any,
    next_token: Any,
    committed_len: Any,
    row_pages: Any,
    page_size: int,
    kv_lens: Any,
    input_ids: Any,
    positions: Any,
    slot_mapping: Any,
    page_table: Any,
    sample_positions: Any,
) -> None:
    """TypeError or ValueError unless the tensors of `fill_step_tensors` fit together."""
    _checks.require(op, page_size >= 1, f"page_size is {page_size}, expected at least 1")
    for name, x in (("entries", entries), ("tokens", tokens)):
        _checks.dtype(op, name, x, ("int32",))
        _checks.rank(op, name, x, 2)
        _checks.shape(op, name, x, (4, x.shape[1]), "what an entry or a token is made of")
        _checks.contiguous_last(op, name, x)
    _list(op, "sample_tokens", sample_tokens)
    _checks.dtype(op, "next_token", next_token, ("int32",))
    _list(op, "committed_len", committed_len)
    _checks.dtype(op, "row_pages", row_pages, ("int32",))
    _checks.rank(op, "row_pages", row_pages, 2)
    for name, x, like, dtype in (
        ("kv_lens", kv_lens, entries[0], "int32"),
        ("input_ids", input_ids, tokens[0], "int32"),
        ("positions", positions, tokens[0], "int32"),
        ("slot_mapping", slot_mapping, tokens[0], "int64"),
        ("sample_positions", sample_positions, sample_tokens, "int64"),
    ):
        _list(op, name, x, dtype)
        _checks.shape(op, name, x, like.shape)
    _checks.dtype(op, "page_table", page_table, ("int32",))
    _checks.rank(op, "page_table", page_table, 2)
    _checks.shape(op, "page_table", page_table, (entries.shape[1], page_table.shape[1]), "entries")
    columns = f"page_table has {page_table.shape[1]} columns, row_pages has {row_pages.shape[1]}"
    _checks.require(op, page_table.shape[1] <= row_pages.shape[1], columns)
    for name, x in (("next_token", next_token), ("row_pages", row_pages), ("table", page_table)):
        _checks.require(op, x.is_contiguous(), f"{name} is not contiguous")


def check_accept(
    op: str,
    ids: Any,
    rows: Any,
    grow_rows: Any,
    next_token: Any,
    committed_len: Any,
    cu_samples: Any,
    drafts: Any,
    counts: Any,
) -> None:
    """TypeError or ValueError unless the tensors of `accept_tokens` fit together."""
    for name, x in (("ids", ids), ("rows", rows), ("grow_rows", grow_rows)):
        _list(op, name, x)
    _checks.shape(op, "grow_rows", grow_rows, rows.shape, "rows")
    _list(op, "committed_len", committed_len)
    _checks.dtype(op, "next_token", next_token, ("int32",))
    _checks.rank(op, "next_token", next_token, 2)
    expected = (committed_len.shape[0], next_token.shape[1])
    _checks.shape(op, "next_token", next_token, expected, "rows of committed_len, any")
    _checks.contiguous_last(op, "next_token", next_token)
    _checks.require(op, next_token.shape[1] >= 1, "next_token has no columns")
    together = (cu_samples is None) == (drafts is None)
    _checks.require(op, together, "cu_samples and drafts go together")
    if cu_samples is None:
        _checks.shape(op, "rows", rows, ids.shape, "ids, one an entry without cu_samples")
    else:
        _list(op, "cu_samples", cu_samples)
        _checks.shape(op, "cu_samples", cu_samples, (len(rows) + 1,), "one more than rows")
        _list(op, "drafts", drafts)
        _checks.shape(op, "drafts", drafts, ids.shape, "ids")
    if counts is not None:
        _list(op, "counts", counts)
        _checks.shape(op, "counts", counts, rows.shape, "rows")


def _list(op: str, name: str, x: Any, dtype: str = "int32") -> None:
    """One dimension, contiguous."""
    _checks.dtype(op, name, x, (dtype,))
    _checks.rank(op, name, x, 1)
    _checks.contiguous_last(op, name, x)
