"""Penalties, sampling and log-probabilities over rows of logits.

The draw (Gumbel-max with counter-based noise; Philox: Salmon et al., SC 2011): among the kept ids
the token is the argmax of `x - log(E)`, E = -log1p(-u) in float32, ties to the lowest id, where
x = logit / temperature in float32 and u = (w + 0.5) * 2**-32, at most 1 - 2**-24, from word
w = `id % 4` of Philox4x32-10 with key = the row's 64-bit seed (low word first) and counter =
(id // 4, position, stream, 0). So a draw depends on its own row, seed and position alone.

Kept ids, each step on what the one before left, in the order (x descending, id ascending):
    top-k   the first top_k; off for top_k <= 0 or >= V
    top-p   those whose probability mass before them is below top_p, the first always; off for
            top_p >= 1 and NaN
    min-p   those with probability at least min_p times the largest, the first always; off for
            min_p <= 0 and NaN
"""

from __future__ import annotations

from functools import cache
from typing import Any

from . import _arrays, _checks, _dispatch, _loader
from ._arrays import Array, torch_views
from ._checks.sampling import (
    check_counts,
    check_draw,
    check_logits,
    check_penalties,
    check_row_values,
    check_top_n,
)
from ._lazy import reference
from .logit_edits import LogitEdits


def apply_penalties_inplace(
    logits: Array, counts: Array, slots: Array, repetition: Array, frequency: Array, presence: Array
) -> None:
    """Penalise seen tokens, in place.

    logits: float32 [B, V], rows may be strided. counts: int32 [S, V]; bit 30 of a word says that
    the token is in the prompt, its low 30 bits how often it was generated. slots: int32 [B], the
    row of counts for each row of logits, -1: leave the row alone. repetition, frequency,
    presence: float32 [B].
    `x = x / r if x > 0 else x * r` for tokens of prompt or output, then
    `x -= frequency * count + presence * (count > 0)`, in float32.
    Errors: TypeError, ValueError.
    """
    op = "apply_penalties_inplace"
    run = _dispatch.native(op, logits)
    if run is not None:
        run(logits, counts, slots, repetition, frequency, presence)
        return
    x = _arrays.as_torch(logits)
    penalties = torch_views(counts, slots, repetition, frequency, presence)
    check_logits(op, x)
    check_penalties(op, x, *penalties)
    reference.apply_penalties_inplace(x, *penalties, compute_dtype=reference.float32())


def count_tokens_inplace(counts: Array, slots: Array, ids: Array) -> None:
    """Add one to the generated count of `ids[b]` in row `slots[b]`, in place.

    counts: int32 [S, V]; slots, ids: int32 [B]; a slot or id of -1 skips the row. The same pair
    twice counts twice. Errors: TypeError, ValueError.
    """
    op = "count_tokens_inplace"
    run = _dispatch.native(op, counts)
    if run is not None:
        run(counts, slots, ids)
        return
    counts, slots, ids = torch_views(counts, slots, ids)
    check_counts(op, counts, slots, slots.shape[0])
    check_row_values(op, "ids", ids, slots.shape[0], "int32")
    reference.count_tokens_inplace(counts, slots, ids)


def top_k_top_p_sampling(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
    position: Array,
    *,
    stream: int = 0,
    edits: LogitEdits | None = None,
    out: Array | None = None,
) -> Array:
    """Draw one id for each row; see the module for the definition.

    logits: float32 [B, V], rows may be strided, not modified. temperature, top_p, min_p: float32
    [B]; top_k: int32 [B]; seed: int64 [B], the bits of an unsigned seed; position: int64 [B], the
    absolute position of the token drawn (its low 32 bits count). stream: 0 sample, 1 draft
    acceptance, 2 residual. edits: what changes the logits first, on the way. out: int32 [B].
    Returns out.

    A temperature below the least normal float32 (1.18e-38), or one so small that max(logits) /
    temperature overflows, takes the largest logit (lowest id on ties) and no filter; infinity
    counts as the largest float32.
    An id whose logit is -inf is never drawn.
    A row with a NaN, with +inf, or with nothing but -inf gives -1. Top-p masses are sums of
    float32 terms or better, so an id whose mass lies within 1e-5 of the border may fall to
    either side. Errors: TypeError, ValueError.
    """
    settings = (temperature, top_k, top_p, min_p, seed, position)
    if out is None:
        out = _arrays.empty(logits, _arrays.shape(logits)[:1], "int32")
    _draw(logits, settings, stream, edits, out, None)
    return out


def top_k_top_p_sampling_with_logprobs(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
    position: Array,
    top_n: int = 0,
    *,
    stream: int = 0,
    edits: LogitEdits | None = None,
) -> tuple[Array, Array, Array, Array]:
    """`top_k_top_p_sampling` and `token_logprobs` of what it drew, in one pass over the logits.

    Returns (ids int32 [B], logprob float32 [B], top_logprobs float32 [B, top_n], top_ids int32
    [B, top_n]). The log-probabilities are of the logits as given, before edits and temperature;
    NaN for a row that draws -1. Errors: TypeError, ValueError (top_n outside of 0 .. V).
    """
    settings = (temperature, top_k, top_p, min_p, seed, position)
    logprobs = _logprob_arrays("top_k_top_p_sampling_with_logprobs", logits, top_n)
    out = _arrays.empty(logits, tuple(logits.shape)[:1], "int32")
    _draw(logits, settings, stream, edits, out, logprobs)
    return out, *logprobs


def token_logprobs(logits: Array, ids: Array, top_n: int = 0) -> tuple[Array, Array, Array]:
    """Log-softmax of the logits at ids, and its top_n largest.

    logits: float32 [B, V], rows may be strided; ids: int32 [B] (-1: the result is NaN).
    Returns (logprob float32 [B], top_logprobs float32 [B, top_n], top_ids int32 [B, top_n]),
    largest first, ties to the lowest id. Computed in float32 or better.
    Errors: TypeError, ValueError (top_n outside of 0 .. V; on the CPU an id outside of -1 .. V-1).
    """
    op = "token_logprobs"
    results = _logprob_arrays(op, logits, top_n)
    run = _dispatch.native(op, logits)
    if run is not None:
        run(logits, ids, *results, workspace(logits))
        return results
    logits, ids = torch_views(logits, ids)
    rows = check_logits(op, logits)
    check_row_values(op, "ids", ids, rows, "int32")
    check_top_n(op, top_n, logits)
    _fill(results, reference.token_logprobs(logits, ids, top_n))
    return results


def _draw(
    logits: Array,
    settings: tuple[Array, ...],
    stream: int,
    edits: LogitEdits | None,
    out: Array,
    logprobs: tuple[Array, Array, Array] | None,
) -> None:
    op = "top_k_top_p_sampling"
    run = _dispatch.native(op, logits)
    if run is not None:
        flat = None if edits is None else edits.flat()
        run(logits, *settings, stream, out, workspace(logits), flat, logprobs)
        return
    x, columns, checked = check_draw(op, logits, settings, stream, edits)
    ids = _arrays.as_torch(out)
    check_row_values(op, "out", ids, x.shape[0], "int32")
    edited = x
    if checked is not None:
        position = columns[-1]
        edited = reference.edited_logits(x, position, checked, compute_dtype=reference.float32())
    reference.top_k_top_p_sampling(edited, *columns, stream=stream, out=ids)
    if logprobs is not None:
        top_n = int(logprobs[1].shape[1])
        check_top_n(op, top_n, x)
        _fill(logprobs, reference.token_logprobs(x, ids, top_n))


def _logprob_arrays(op: str, logits: Array, top_n: int) -> tuple[Array, Array, Array]:
    _checks.rank(op, "logits", logits, 2)
    rows = int(logits.shape[0])
    logprob = _arrays.empty(logits, (rows,), "float32")
    top_logprobs = _arrays.empty(logits, (rows, top_n), "float32")
    top_ids = _arrays.empty(logits, (rows, top_n), "int32")
    return logprob, top_logprobs, top_ids


def _fill(arrays: tuple[Array, ...], results: tuple[Any, ...]) -> None:
    for array, result in zip(arrays, results, strict=True):
        _arrays.as_torch(array).copy_(result)


def workspace(logits: Array) -> Array | None:
    """Scratch for the native call; None where it needs none, where Triton serves the call, or where
    the shape is for the library's checks to refuse."""
    if _loader.bind is None or len(logits.shape) != 2:
        return None
    size = _workspace_size(int(logits.shape[0]), int(logits.shape[1]))
    return _arrays.empty(logits, (size,), "uint8") if size else None


@cache
def _workspace_size(rows: int, columns: int) -> int:
    assert _loader.bind is not None  # a native call is about to be made
    return int(_loader.bind.sampling_workspace_size(rows, columns))
