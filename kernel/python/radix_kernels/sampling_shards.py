"""Sampling where each rank holds the logits of a part of the vocabulary.

Each rank lists what its shard may contribute (`sampling_candidates`, a few kilobytes a row), the
lists are gathered, and one draw from them (`sample_candidates`) gives the id that
`top_k_top_p_sampling` draws from the whole logits: the full logits never travel.
"""

from __future__ import annotations

from . import _arrays, _checks, _dispatch
from ._arrays import Array
from ._checks.sampling import RECORD_HEADER, check_draw, check_records, check_settings, check_shard
from ._lazy import reference
from .logit_edits import LogitEdits
from .sampling import workspace


def sampling_candidates(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
    position: Array,
    *,
    first_id: int,
    vocab_size: int,
    num_candidates: int = 256,
    stream: int = 0,
    edits: LogitEdits | None = None,
) -> Array:
    """What one shard of the vocabulary contributes to a draw: int64 [B, 3 + num_candidates].

    logits: float32 [B, n], those of ids first_id .. first_id + n - 1; first_id is a multiple of 4.
    The other arrays and the edits are as in `top_k_top_p_sampling`, the same on every rank; but
    counts and bitmask are those of the shard's columns. A record's words are described in
    `radix_kernels/sampling_shards.h`; what a record does not use is not written. Errors: TypeError,
    ValueError.
    """
    op = "sampling_candidates"
    settings = (temperature, top_k, top_p, min_p, seed, position)
    _checks.rank(op, "logits", logits, 2)
    rows = int(logits.shape[0])
    records = _arrays.empty(logits, (rows, RECORD_HEADER + num_candidates), "int64")
    run = _dispatch.native(op, logits)
    if run is not None:
        flat = None if edits is None else edits.flat()
        run(logits, *settings, stream, first_id, vocab_size, records, workspace(logits), flat)
        return records
    x, columns, checked = check_draw(op, logits, settings, stream, edits)
    check_shard(op, x, first_id, vocab_size, num_candidates)
    found = reference.sampling_candidates(
        x,
        *columns,
        first_id=first_id,
        vocab_size=vocab_size,
        num_candidates=num_candidates,
        stream=stream,
        edits=checked,
    )
    _arrays.as_torch(records).copy_(found)
    return records


def sample_candidates(
    records: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
    position: Array,
    *,
    vocab_size: int,
    stream: int = 0,
    out: Array | None = None,
) -> Array:
    """The draw from the records of all shards: int32 [B].

    records: int64 [W, B, 3 + C] of `sampling_candidates`, in any order of the shards; W * C at most
    2,048. The other arguments are those of `sampling_candidates`. The id is that which
    `top_k_top_p_sampling` draws from the whole logits, -1 included; -2 says that the filters may
    keep ids that no shard listed (top_k above C, or a nucleus of more ids than that): such a row
    must be drawn from its logits. Greedy and unfiltered rows, and rows with top_k up to C, never
    give -2. Errors: TypeError, ValueError.
    """
    op = "sample_candidates"
    settings = (temperature, top_k, top_p, min_p, seed, position)
    if out is None:
        out = _arrays.empty(records, _arrays.shape(temperature), "int32")
    run = _dispatch.native(op, records)
    if run is not None:
        run(records, *settings, stream, vocab_size, out)
        return out
    given = _arrays.as_torch(records)
    check_records(op, given)
    reference.sample_candidates(
        given,
        *check_settings(op, settings, int(given.shape[1])),
        vocab_size=vocab_size,
        stream=stream,
        out=_arrays.as_torch(out),
    )
    return out
