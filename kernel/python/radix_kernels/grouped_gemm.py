"""Grouped products: rows by the weight of their group, for expert parallelism and experts that are
not fused.

Common to both
    weight          [E, N, K], contiguous, of x's dtype: bfloat16, float16 or float32; rows are of K elements
    FP8             x and weight float8_e4m3fn, or both float8_e4m3fnuz (Triton), with float32 scales: x_scale, one a
                    row and 128 of K, contiguous; weight_scale [E, ceil(N / 128), ceil(K / 128)],
                    contiguous; out is bfloat16 then
    rows            may be strided, the last dimension is contiguous; those of no group have no influence and stay
    result          sums are float32, rounded once; a row's depends on no other row
On a GPU: Triton, on Hopper a native kernel (16 bits and FP8; sizes in multiples of 8, K of FP8 of
16; groups of x that follow each other). Nothing is read on the host, so a CUDA graph may capture
them.
"""

from __future__ import annotations

from typing import Any

from . import _arrays, _checks, _dispatch, _loader
from ._arrays import Array

ALIGNMENT = 128
SCALE_BLOCK = 128


def m_grouped_gemm_contiguous(
    x: Array,
    weight: Array,
    m_indices: Array,
    *,
    x_scale: Array | None = None,
    weight_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """`out[i] = weight[m_indices[i]] @ x[i]`, the rows of a group behind each other.

    x: [M, K]. m_indices: int32 [M], contiguous, a row's group; -1, or a number past the last group:
    padding. Each group begins at a multiple of 128, so that 128 rows from there on are of one group
    or padding behind it. out: [M, N]. Returns out. x_scale: [M, ceil(K / 128)]. See the module for
    the rest. Tolerance to the float64 reference: norm 4e-3 (bfloat16, FP8), 5e-4 (float16), 2e-6
    (float32). Errors: TypeError (dtype), ValueError (shape, stride).
    """
    op = "m_grouped_gemm_contiguous"
    args = [_arrays.as_torch(t) for t in (x, weight, m_indices, x_scale, weight_scale)]
    _check(op, 2, "m_indices", *args)
    _checks.shape(op, "m_indices", args[2], x.shape[:1], "rows of x")
    out = _output(op, args[0], args[1], out, x)
    o = _arrays.as_torch(out)
    a, w, groups, s, ws = args

    def call(run: _dispatch.Native, bound: bool) -> None:
        run(a, w, groups, 0, s, ws, o, _workspace(a, w)) if bound else run(a, w, groups, s, ws, o)

    if _dispatch.attempt(op, x, call):
        return out
    from . import reference

    reference.m_grouped_gemm_contiguous(
        a, w, groups, x_scale=s, weight_scale=ws, out=o, compute_dtype=reference.float32()
    )
    return out


def m_grouped_gemm_masked(
    x: Array,
    weight: Array,
    masked_m: Array,
    *,
    expected_m: int | None = None,
    x_scale: Array | None = None,
    weight_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """`out[e, i] = weight[e] @ x[e, i]` for i below masked_m[e]; what lies behind has no influence
    and is not written.

    x: [E, M, K]. masked_m: int32 [E], contiguous, each group's rows, at most M. expected_m: about
    how many a group has (default M); the tiles follow it, the result does not. out: [E, M, N].
    Returns out. x_scale: [E, M, ceil(K / 128)]. See the module for the rest. Tolerance and errors
    as `m_grouped_gemm_contiguous`.
    """
    op = "m_grouped_gemm_masked"
    args = [_arrays.as_torch(t) for t in (x, weight, masked_m, x_scale, weight_scale)]
    _check(op, 3, "masked_m", *args)
    _checks.require(
        op,
        weight.shape[0] == x.shape[0],
        f"x has {x.shape[0]} groups, expected {weight.shape[0]} as weight",
    )
    _checks.shape(op, "masked_m", args[2], x.shape[:1], "groups of x")
    expected = x.shape[1] if expected_m is None else expected_m
    _checks.require(op, expected >= 0, f"expected_m is {expected_m}, expected 0 or more")
    expected = min(expected, x.shape[1])
    out = _output(op, args[0], args[1], out, x)
    o = _arrays.as_torch(out)
    a, w, counts, s, ws = args

    def call(run: _dispatch.Native, bound: bool) -> None:
        run(a, w, counts, expected, s, ws, o, *([_workspace(a, w)] if bound else []))

    if _dispatch.attempt(op, x, call):
        return out
    from . import reference

    reference.m_grouped_gemm_masked(
        a, w, counts, x_scale=s, weight_scale=ws, out=o, compute_dtype=reference.float32()
    )
    return out


def _check(
    op: str, rank: int, name: str, x: Any, weight: Any, groups: Any, x_scale: Any, weight_scale: Any
) -> None:
    _checks.dtype(op, "x", x, (*_checks.FLOATS, *_checks.FP8))
    _checks.rank(op, "x", x, rank)
    _checks.contiguous_last(op, "x", x)
    _checks.rank(op, "weight", weight, 3)
    _checks.same_dtype(op, "weight", weight, "x", x)
    _checks.dtype(op, name, groups, ("int32",))
    experts, n, k = weight.shape
    _checks.require(op, x.shape[-1] == k, f"x has rows of {x.shape[-1]}, expected {k} as weight")
    fp8 = _arrays.dtype_name(x) in _checks.FP8
    _checks.require(op, (x_scale is not None) == fp8, "x_scale goes with FP8")
    _checks.require(op, (weight_scale is not None) == fp8, "weight_scale goes with FP8")
    checked = [("weight", weight), (name, groups)]
    if fp8:
        blocks = -(-k // SCALE_BLOCK)
        for which, scale, want in (
            ("x_scale", x_scale, (*x.shape[:-1], blocks)),
            ("weight_scale", weight_scale, (experts, -(-n // SCALE_BLOCK), blocks)),
        ):
            _checks.dtype(op, which, scale, ("float32",))
            _checks.shape(
                op, which, scale, want, "one a row and 128 of K; one a block of 128 x 128"
            )
            checked.append((which, scale))
    for which, t in checked:
        _checks.require(op, t.is_contiguous(), f"{which} is not contiguous")


def _workspace(x: Any, weight: Any) -> Any:
    assert _loader.bind is not None
    fp8 = _arrays.dtype_name(x) in _checks.FP8
    size = _loader.bind.m_grouped_gemm_workspace_size(fp8, x.shape[:-1].numel(), *weight.shape[::2])
    return _arrays.empty(x, (size,), "uint8")


def _output(op: str, x: Any, weight: Any, out: Array | None, given: Array) -> Array:
    fp8 = _arrays.dtype_name(x) in _checks.FP8
    shape = (*x.shape[:-1], weight.shape[1])
    if out is None:
        return _arrays.empty(given, shape, "bfloat16" if fp8 else None)
    o = _arrays.as_torch(out)
    _checks.shape(op, "out", o, shape, "rows of x, columns of weight")
    _checks.dtype(op, "out", o, ("bfloat16",) if fp8 else (_arrays.dtype_name(x),))
    _checks.contiguous_last(op, "out", o)
    return out
