"""Penalties, sampling and log-probabilities over rows of logits.

The draw (Gumbel-max with counter-based noise; Philox: Salmon et al., SC 2011): among the kept ids
the token is the argmax of `x - log(E)`, E = -log1p(-u) in float32, ties to the lowest id, where
x = logit / temperature in float32 and u = (w + 0.5) * 2**-32, at most 1 - 2**-24, from word
w = `id % 4` of Philox4x32-10 with key = the row's 64-bit seed (low word first) and counter =
(id // 4, position, stream, 0). So a draw depends on its own row, seed and position alone.

Kept ids, each step on what the one before left, in the order (x descending, id ascending):
    top-k   the first top_k; off for top_k <= 0 or >= V
    top-p   those whose probability mass before them is below top_p, the first always; off for
            top_p >= 1
    min-p   those with probability at least min_p times the largest; off for min_p <= 0
"""

from __future__ import annotations

from typing import Any

from . import _arrays, _checks, _dispatch
from ._arrays import Array


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
    from . import reference

    arrays = (logits, counts, slots, repetition, frequency, presence)
    x, c, s, rep, freq, pres = (_arrays.as_torch(t) for t in arrays)
    rows = _check_logits(op, x)
    _check_counts(op, c, s, rows)
    _checks.shape(op, "counts", c, (c.shape[0], x.shape[1]), "columns of logits")
    for name, t in (("repetition", rep), ("frequency", freq), ("presence", pres)):
        _check_row_values(op, name, t, rows, "float32")
    reference.apply_penalties_inplace(x, c, s, rep, freq, pres, compute_dtype=reference.float32())


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
    from . import reference

    c, s, i = (_arrays.as_torch(t) for t in (counts, slots, ids))
    _check_counts(op, c, s, s.shape[0])
    _check_row_values(op, "ids", i, s.shape[0], "int32")
    reference.count_tokens_inplace(c, s, i)


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
    out: Array | None = None,
) -> Array:
    """Draw one id for each row; see the module for the definition.

    logits: float32 [B, V], rows may be strided, not modified. temperature, top_p, min_p: float32
    [B]; top_k: int32 [B]; seed: int64 [B], the bits of an unsigned seed; position: int64 [B], the
    absolute position of the token drawn (its low 32 bits count). stream: 0 sample, 1 draft
    acceptance, 2 residual. out: int32 [B]. Returns out.

    A temperature of 0 or less, or one so small that max(logits) / temperature overflows, takes
    the largest logit (lowest id on ties) and no filter. An id whose logit is -inf is never drawn.
    A row with a NaN, with +inf, or with nothing but -inf gives -1. Top-p masses are sums of
    float32 terms or better, so an id whose mass lies within 1e-5 of the border may fall to
    either side. Errors: TypeError, ValueError.
    """
    op = "top_k_top_p_sampling"
    if out is None:
        out = _arrays.empty(logits, tuple(logits.shape)[:1], "int32")
    run = _dispatch.native(op, logits)
    if run is not None:
        run(logits, temperature, top_k, top_p, min_p, seed, position, stream, out)
        return out
    from . import reference

    arrays = (logits, temperature, top_k, top_p, min_p, seed, position, out)
    x, temp, k, p, mp, sd, pos, o = (_arrays.as_torch(t) for t in arrays)
    rows = _check_logits(op, x)
    for name, t, dtype in (
        ("temperature", temp, "float32"),
        ("top_k", k, "int32"),
        ("top_p", p, "float32"),
        ("min_p", mp, "float32"),
        ("seed", sd, "int64"),
        ("position", pos, "int64"),
        ("out", o, "int32"),
    ):
        _check_row_values(op, name, t, rows, dtype)
    _checks.require(op, 0 <= stream < 2**32, f"stream is {stream}, expected 0 .. 2**32 - 1")
    reference.top_k_top_p_sampling(x, temp, k, p, mp, sd, pos, stream=stream, out=o)
    return out


def token_logprobs(logits: Array, ids: Array, top_n: int = 0) -> tuple[Array, Array, Array]:
    """Log-softmax of the logits at ids, and its top_n largest.

    logits: float32 [B, V], rows may be strided; ids: int32 [B] (-1: the result is NaN).
    Returns (logprob float32 [B], top_logprobs float32 [B, top_n], top_ids int32 [B, top_n]),
    largest first, ties to the lowest id. Computed in float32 or better.
    Errors: TypeError, ValueError (top_n outside of 0 .. V; on the CPU an id outside of -1 .. V-1).
    """
    op = "token_logprobs"
    rows = int(logits.shape[0])
    logprob = _arrays.empty(logits, (rows,), "float32")
    top = _arrays.empty(logits, (rows, top_n), "float32")
    top_ids = _arrays.empty(logits, (rows, top_n), "int32")
    run = _dispatch.native(op, logits)
    if run is not None:
        run(logits, ids, top_n, logprob, top, top_ids)
        return logprob, top, top_ids
    from . import reference

    x, i = _arrays.as_torch(logits), _arrays.as_torch(ids)
    _check_logits(op, x)
    _check_row_values(op, "ids", i, rows, "int32")
    _checks.require(op, 0 <= top_n <= x.shape[1], f"top_n is {top_n}, expected 0 .. {x.shape[1]}")
    results = reference.token_logprobs(x, i, top_n)
    for array, result in zip((logprob, top, top_ids), results, strict=True):
        _arrays.as_torch(array).copy_(result)
    return logprob, top, top_ids


def _check_logits(op: str, x: Any) -> int:
    _checks.dtype(op, "logits", x, ("float32",))
    _checks.rank(op, "logits", x, 2)
    _checks.contiguous_last(op, "logits", x)
    return int(x.shape[0])


def _check_counts(op: str, counts: Any, slots: Any, rows: int) -> None:
    _checks.dtype(op, "counts", counts, ("int32",))
    _checks.rank(op, "counts", counts, 2)
    _checks.contiguous_last(op, "counts", counts)
    _check_row_values(op, "slots", slots, rows, "int32")


def _check_row_values(op: str, name: str, x: Any, rows: int, dtype: str) -> None:
    _checks.dtype(op, name, x, (dtype,))
    _checks.shape(op, name, x, (rows,), "one for each row")
