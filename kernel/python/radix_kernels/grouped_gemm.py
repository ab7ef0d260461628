"""Grouped products: rows by the weight of their group, for expert parallelism and experts that are
not fused.

Common to both
    weight          [E, N, K], contiguous, of x's dtype: bfloat16, float16 or float32; rows are of K
                    elements
    FP8             x and weight float8_e4m3fn, or both float8_e4m3fnuz (Triton), with float32
                    scales: x_scale, one for a row and 128 of K, contiguous; weight_scale [E,
                    ceil(N / 128), ceil(K / 128)], contiguous; out is bfloat16 then
    rows            may be strided, the last dimension is contiguous; those of no group have no
                    influence and stay
    result          sums are float32, rounded once; a row's depends on no other row
On a GPU: Triton, on Hopper a native kernel (16 bits and FP8; sizes in multiples of 8, K of FP8 of
16; groups of x that follow each other). Nothing is read on the host, so a CUDA graph may capture
them.
"""

from __future__ import annotations

from typing import Any

from . import _arrays, _checks, _dispatch, _loader
from ._arrays import Array, torch_views
from ._checks.grouped_gemm import check_grouped, check_output
from ._lazy import reference


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
    a, w, groups, a_scale, w_scale = torch_views(x, weight, m_indices, x_scale, weight_scale)
    check_grouped(op, 2, "m_indices", a, w, groups, a_scale, w_scale)
    _checks.shape(op, "m_indices", groups, x.shape[:1], "rows of x")
    out = _output(op, a, w, out, like=x)
    target = _arrays.as_torch(out)

    def call(run: _dispatch.Native, bound: bool) -> None:
        if bound:
            run(a, w, groups, 0, a_scale, w_scale, target, _workspace(a, w))
        else:
            run(a, w, groups, a_scale, w_scale, target)

    if not _dispatch.attempt(op, x, call):
        reference.m_grouped_gemm_contiguous(
            a,
            w,
            groups,
            x_scale=a_scale,
            weight_scale=w_scale,
            out=target,
            compute_dtype=reference.float32(),
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
    a, w, counts, a_scale, w_scale = torch_views(x, weight, masked_m, x_scale, weight_scale)
    check_grouped(op, 3, "masked_m", a, w, counts, a_scale, w_scale)
    groups = x.shape[0]
    experts = weight.shape[0]
    _checks.require(op, experts == groups, f"x has {groups} groups, expected {experts} as weight")
    _checks.shape(op, "masked_m", counts, x.shape[:1], "groups of x")
    expected = x.shape[1] if expected_m is None else expected_m
    _checks.require(op, expected >= 0, f"expected_m is {expected_m}, expected 0 or more")
    expected = min(expected, x.shape[1])
    out = _output(op, a, w, out, like=x)
    target = _arrays.as_torch(out)

    def call(run: _dispatch.Native, bound: bool) -> None:
        if bound:
            run(a, w, counts, expected, a_scale, w_scale, target, _workspace(a, w))
        else:
            run(a, w, counts, expected, a_scale, w_scale, target)

    if not _dispatch.attempt(op, x, call):
        reference.m_grouped_gemm_masked(
            a,
            w,
            counts,
            x_scale=a_scale,
            weight_scale=w_scale,
            out=target,
            compute_dtype=reference.float32(),
        )
    return out


def _workspace(x: Any, weight: Any) -> Any:
    assert _loader.bind is not None
    experts, _, k = weight.shape
    rows = x.shape[:-1].numel()
    size = _loader.bind.m_grouped_gemm_workspace_size(_is_fp8(x), rows, experts, k)
    return _arrays.empty(x, (size,), "uint8")


def _output(op: str, x: Any, weight: Any, out: Array | None, like: Array) -> Array:
    """out, checked, or a new array of the framework of `like`."""
    if out is not None:
        check_output(op, x, weight, _arrays.as_torch(out))
        return out
    shape = (*x.shape[:-1], weight.shape[1])
    return _arrays.empty(like, shape, "bfloat16" if _is_fp8(x) else None)


def _is_fp8(x: Any) -> bool:
    return _arrays.dtype_name(x) in _checks.FP8
