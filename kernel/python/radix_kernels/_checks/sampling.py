"""Argument checks of sampling, for the reference and Triton."""

from __future__ import annotations

from typing import Any

from .. import _checks
from .._arrays import Array, as_torch, torch_views
from ..logit_edits import LogitEdits

_SETTINGS = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "seed": "int64",
    "position": "int64",
}
RECORD_HEADER = 3  # words of a shard's record before its candidates
MOST_CANDIDATES = 2048  # of all shards together


def check_draw(
    op: str, logits: Array, settings: tuple[Array, ...], stream: int, edits: LogitEdits | None
) -> tuple[Any, list[Any], LogitEdits | None]:
    """Logits, settings and edits as torch tensors, checked in the words of the native library."""
    x = as_torch(logits)
    rows = check_logits(op, x)
    columns = check_settings(op, settings, rows)
    _checks.require(op, 0 <= stream < 2**32, f"stream is {stream}, expected 0 .. 2**32 - 1")
    return x, columns, None if edits is None else _checked_edits(op, x, edits)


def check_settings(op: str, settings: tuple[Array, ...], rows: int) -> list[Any]:
    """The settings of a draw as torch tensors, checked: each has a value for every row."""
    columns = [as_torch(setting) for setting in settings]
    for (name, dtype), column in zip(_SETTINGS.items(), columns, strict=True):
        check_row_values(op, name, column, rows, dtype)
    return columns


def check_logits(op: str, x: Any) -> int:
    """The number of rows. TypeError or ValueError unless x is float32 [B, V]."""
    _checks.dtype(op, "logits", x, ("float32",))
    _checks.rank(op, "logits", x, 2)
    _checks.contiguous_last(op, "logits", x)
    return int(x.shape[0])


def check_row_values(op: str, name: str, x: Any, rows: int, dtype: str) -> None:
    """TypeError or ValueError unless x is [rows] of the dtype."""
    _checks.dtype(op, name, x, (dtype,))
    _checks.shape(op, name, x, (rows,), "one for each row")


def check_top_n(op: str, top_n: int, x: Any) -> None:
    """ValueError unless x [B, V] has that many columns."""
    _checks.require(op, 0 <= top_n <= x.shape[1], f"top_n is {top_n}, expected 0 .. {x.shape[1]}")


def check_counts(op: str, counts: Any, slots: Any, rows: int) -> None:
    """TypeError or ValueError unless counts is int32 [S, V] and slots int32 [rows]."""
    _checks.dtype(op, "counts", counts, ("int32",))
    _checks.rank(op, "counts", counts, 2)
    _checks.contiguous_last(op, "counts", counts)
    check_row_values(op, "slots", slots, rows, "int32")


def check_penalties(
    op: str, x: Any, counts: Any, slots: Any, repetition: Any, frequency: Any, presence: Any
) -> None:
    """TypeError or ValueError unless the penalties fit logits x [B, V]."""
    rows, columns = x.shape
    check_counts(op, counts, slots, rows)
    _checks.shape(op, "counts", counts, (counts.shape[0], columns), "columns of logits")
    factors = (("repetition", repetition), ("frequency", frequency), ("presence", presence))
    for name, factor in factors:
        check_row_values(op, name, factor, rows, "float32")


def check_shard(op: str, x: Any, first_id: int, vocab_size: int, num_candidates: int) -> None:
    """ValueError unless the shard of logits x [B, n] lies in the vocabulary."""
    end = first_id + int(x.shape[1])
    _checks.require(
        op,
        first_id >= 0 and first_id % 4 == 0 and end <= vocab_size,
        f"first_id is {first_id}, vocab_size {vocab_size}",
    )
    _checks.require(
        op,
        1 <= num_candidates <= MOST_CANDIDATES,
        f"records has {num_candidates} candidates, expected 1 to {MOST_CANDIDATES}",
    )


def check_records(op: str, records: Any) -> None:
    """TypeError or ValueError unless records is int64 [W, B, 3 + C] of shards that fit a draw."""
    _checks.dtype(op, "records", records, ("int64",))
    _checks.rank(op, "records", records, 3)
    shards = records.shape[0]
    candidates = records.shape[2] - RECORD_HEADER
    _checks.require(
        op,
        candidates >= 1 and 1 <= shards * candidates <= MOST_CANDIDATES,
        f"records has {shards} x {candidates} candidates, expected 1 to {MOST_CANDIDATES}",
    )


def _checked_edits(op: str, x: Any, edits: LogitEdits) -> LogitEdits:
    """The edits as torch tensors, each checked against logits x [B, V]."""
    return LogitEdits(
        bias=_checked_bias(op, x, edits.bias),
        penalties=_checked_penalties(op, x, edits.penalties),
        min_tokens=_checked_min_tokens(op, x, edits.min_tokens),
        bitmask=_checked_bitmask(op, x, edits.bitmask),
    )


def _checked_bias(op: str, x: Any, bias: tuple[Array, Array] | None) -> tuple[Any, Any] | None:
    if bias is None:
        return None
    ids, values = torch_views(*bias)
    _check_lists(op, "bias_ids", ids, x.shape[0], "int32")
    _check_lists(op, "bias_values", values, x.shape[0], "float32")
    _checks.shape(op, "bias_values", values, ids.shape, "as bias_ids")
    return ids, values


def _checked_penalties(
    op: str, x: Any, penalties: tuple[Array, Array, Array, Array, Array] | None
) -> tuple[Any, Any, Any, Any, Any] | None:
    if penalties is None:
        return None
    counts, slots, repetition, frequency, presence = torch_views(*penalties)
    check_penalties(op, x, counts, slots, repetition, frequency, presence)
    return counts, slots, repetition, frequency, presence


def _checked_min_tokens(
    op: str, x: Any, min_tokens: tuple[Array, Array] | None
) -> tuple[Any, Any] | None:
    if min_tokens is None:
        return None
    stop_ids, min_position = torch_views(*min_tokens)
    _check_lists(op, "stop_ids", stop_ids, x.shape[0], "int32")
    check_row_values(op, "min_position", min_position, x.shape[0], "int64")
    return stop_ids, min_position


def _checked_bitmask(op: str, x: Any, bitmask: Array | None) -> Any:
    if bitmask is None:
        return None
    rows, columns = x.shape
    bits = as_torch(bitmask)
    _checks.dtype(op, "bitmask", bits, ("int32",))
    _checks.shape(op, "bitmask", bits, (rows, -(-columns // 32)), "a bit for each column")
    return bits


def _check_lists(op: str, name: str, x: Any, rows: int, dtype: str) -> None:
    _checks.dtype(op, name, x, (dtype,))
    _checks.rank(op, name, x, 2)
    _checks.shape(op, name, x, (rows, x.shape[1]), "rows of logits")
