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

from dataclasses import dataclass
from functools import cache
from typing import Any

from . import _arrays, _checks, _dispatch, _loader
from ._arrays import Array

_SETTINGS = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "seed": "int64",
    "position": "int64",
}


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What changes the logits of a draw before temperature, in this order; None leaves a step out.

    bias: ids int32 [B, M] and values float32 [B, M], added; an id twice counts twice. penalties:
    counts, slots, repetition, frequency, presence, as `apply_penalties_inplace` takes them.
    min_tokens: stop ids int32 [B, M] and positions int64 [B]; a row's stop ids are -inf while its
    position is below. bitmask: int32 [B, ceil(V / 32)]; bit `id % 32` of word `id // 32` allows an
    id, the others are -inf. In a list of ids a negative one ends the row; an id of V or more is
    skipped.
    """

    bias: tuple[Array, Array] | None = None
    penalties: tuple[Array, Array, Array, Array, Array] | None = None
    min_tokens: tuple[Array, Array] | None = None
    bitmask: Array | None = None

    def flat(self) -> tuple[Array | None, ...]:
        """The ten tensors in the order of the native call."""
        bias, penalties = self.bias or (None, None), self.penalties or (None,) * 5
        return (*bias, *penalties, *(self.min_tokens or (None, None)), self.bitmask)

    @classmethod
    def of(cls, flat: tuple[Array | None, ...]) -> LogitEdits:
        """The edits that `flat` was made of."""
        steps = (flat[:2], flat[2:7], flat[7:9])
        bias, penalties, min_tokens = (None if step[0] is None else step for step in steps)
        return cls(bias, penalties, min_tokens, flat[9])  # type: ignore[arg-type]


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
        out = _arrays.empty(logits, tuple(logits.shape)[:1], "int32")
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
    out = _arrays.empty(logits, tuple(logits.shape)[:1], "int32")
    logprobs = _logprob_arrays(logits, top_n)
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
    results = _logprob_arrays(logits, top_n)
    run = _dispatch.native(op, logits)
    if run is not None:
        run(logits, ids, *results, workspace(logits))
        return results
    from . import reference

    x, i = _arrays.as_torch(logits), _arrays.as_torch(ids)
    rows = _check_logits(op, x)
    _check_row_values(op, "ids", i, rows, "int32")
    check_top_n(op, top_n, x)
    _fill(results, reference.token_logprobs(x, i, top_n))
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
    from . import reference

    x, columns, checked = check_draw(op, logits, settings, stream, edits)
    o = _arrays.as_torch(out)
    _check_row_values(op, "out", o, x.shape[0], "int32")
    edited = x
    if checked is not None:
        edited = reference.edited_logits(x, columns[-1], checked, compute_dtype=reference.float32())
    reference.top_k_top_p_sampling(edited, *columns, stream=stream, out=o)
    if logprobs is not None:
        top_n = int(logprobs[1].shape[1])
        check_top_n(op, top_n, x)
        _fill(logprobs, reference.token_logprobs(x, o, top_n))


def check_draw(
    op: str, logits: Array, settings: tuple[Array, ...], stream: int, edits: LogitEdits | None
) -> tuple[Any, list[Any], LogitEdits | None]:
    """Logits, settings and edits as torch tensors, checked in the words of the native library."""
    x = _arrays.as_torch(logits)
    rows = _check_logits(op, x)
    columns = [_arrays.as_torch(t) for t in settings]
    for (name, dtype), t in zip(_SETTINGS.items(), columns, strict=True):
        _check_row_values(op, name, t, rows, dtype)
    _checks.require(op, 0 <= stream < 2**32, f"stream is {stream}, expected 0 .. 2**32 - 1")
    return x, columns, None if edits is None else _checked_edits(op, x, edits)


def _logprob_arrays(logits: Array, top_n: int) -> tuple[Array, Array, Array]:
    rows = int(logits.shape[0])
    logprob = _arrays.empty(logits, (rows,), "float32")
    return (
        logprob,
        _arrays.empty(logits, (rows, top_n), "float32"),
        _arrays.empty(logits, (rows, top_n), "int32"),
    )


def _fill(arrays: tuple[Array, ...], results: tuple[Any, ...]) -> None:
    for array, result in zip(arrays, results, strict=True):
        _arrays.as_torch(array).copy_(result)


def workspace(logits: Array) -> Array | None:
    """What the native call needs; None where that is nothing, or where Triton serves the call."""
    if _loader.bind is None:
        return None
    rows, columns = (int(n) for n in logits.shape) if len(logits.shape) == 2 else (0, 0)
    size = _workspace_size(rows, columns)
    return _arrays.empty(logits, (size,), "uint8") if size else None


@cache
def _workspace_size(rows: int, columns: int) -> int:
    assert _loader.bind is not None  # a native call is about to be made
    return int(_loader.bind.sampling_workspace_size(rows, columns))


def _checked_edits(op: str, x: Any, edits: LogitEdits) -> LogitEdits:
    """The edits as torch tensors, each checked."""
    rows, columns = x.shape
    bias, penalties, min_tokens, bitmask = (
        None if step is None else tuple(_arrays.as_torch(t) for t in step)
        for step in (
            edits.bias,
            edits.penalties,
            edits.min_tokens,
            None if edits.bitmask is None else (edits.bitmask,),
        )
    )
    if bias is not None:
        _check_lists(op, "bias_ids", bias[0], rows, "int32")
        _check_lists(op, "bias_values", bias[1], rows, "float32")
        _checks.shape(op, "bias_values", bias[1], bias[0].shape, "as bias_ids")
    if penalties is not None:
        _check_counts(op, penalties[0], penalties[1], rows)
        _checks.shape(
            op, "counts", penalties[0], (penalties[0].shape[0], columns), "columns of logits"
        )
        for name, t in zip(("repetition", "frequency", "presence"), penalties[2:], strict=True):
            _check_row_values(op, name, t, rows, "float32")
    if min_tokens is not None:
        _check_lists(op, "stop_ids", min_tokens[0], rows, "int32")
        _check_row_values(op, "min_position", min_tokens[1], rows, "int64")
    if bitmask is not None:
        _checks.dtype(op, "bitmask", bitmask[0], ("int32",))
        _checks.shape(op, "bitmask", bitmask[0], (rows, -(-columns // 32)), "a bit for each column")
    return LogitEdits(bias, penalties, min_tokens, None if bitmask is None else bitmask[0])


def _check_lists(op: str, name: str, x: Any, rows: int, dtype: str) -> None:
    _checks.dtype(op, name, x, (dtype,))
    _checks.rank(op, name, x, 2)
    _checks.shape(op, name, x, (rows, x.shape[1]), "rows of logits")


def check_top_n(op: str, top_n: int, x: Any) -> None:
    _checks.require(op, 0 <= top_n <= x.shape[1], f"top_n is {top_n}, expected 0 .. {x.shape[1]}")


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
