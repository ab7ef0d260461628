"""Quantization to FP8: float8_e4m3fn, on ROCm float8_e4m3fnuz.

scale = max(largest absolute value, 1e-10) / largest of the format; result = round(value / scale),
to nearest even and clamped; NaN stays NaN. Values and scales are computed in float32, so that a
value within float32's rounding of a border between two results may take either.
"""

from __future__ import annotations

import math
from typing import Any

from . import _arrays, _checks, _dispatch, _loader
from ._arrays import Array

_GROUPS = (64, 128)


def per_tensor_quant_fp8(
    input: Array, scale: Array | None = None, *, out: Array | None = None
) -> tuple[Array, Array]:
    """(result, scale) with one scale for all; a given scale, float32 [1], is used as it is.

    input: [..., H] bfloat16, float16 or float32, H a multiple of 16, rows at multiples of 16 bytes.
    out: as input, FP8. Errors: TypeError (dtype), ValueError (shape, stride, alignment).
    """
    op = "per_tensor_quant_fp8"
    static = scale is not None
    out = _result(op, input, tuple(input.shape), out)
    run = _dispatch.native(op, input)
    if run is not None:
        if scale is None:
            scale = _arrays.empty(input, (1,), "float32")
        run(input, static, out, scale)
        return out, scale
    from . import reference

    x, ts, to = (_arrays.as_torch(t) for t in (input, scale, out))
    _check(op, x, to, x.shape)
    if ts is not None:
        _checks.dtype(op, "scale", ts, ("float32",))
        _checks.require(op, ts.numel() == 1, f"scale has shape {list(ts.shape)}, expected [1]")
    result, made = reference.per_tensor_quant_fp8(
        x, ts, dtype=to.dtype, compute_dtype=reference.float32()
    )
    to.copy_(result)
    return out, made if scale is None else scale


def per_token_quant_fp8(
    input: Array, *, out: Array | None = None, scales: Array | None = None
) -> tuple[Array, Array]:
    """(result, scales [..., 1]) with one scale a row; otherwise as `per_token_group_quant`."""
    return _grouped("per_token_quant_fp8", input, None, False, False, out, scales)


def per_token_group_quant(
    input: Array,
    group_size: int = 128,
    *,
    column_major_scales: bool = False,
    out: Array | None = None,
    scales: Array | None = None,
) -> tuple[Array, Array]:
    """(result, scales [..., H / group_size]) with one scale for 64 or 128 columns of a row
    (DeepSeek-V3's activations).

    input: [..., H] bfloat16, float16 or float32, H a multiple of group_size, rows at multiples of
    16 bytes. out: as input, FP8. scales: float32, any strides; column_major_scales: those made here
    step by 1 from row to row (input of two dimensions, scales not given). Errors: TypeError
    (dtype), ValueError (shape, stride, alignment).
    """
    return _grouped(
        "per_token_group_quant", input, _size(group_size), False, column_major_scales, out, scales
    )


def silu_and_mul_quant_fp8(
    input: Array,
    group_size: int | None = 128,
    *,
    column_major_scales: bool = False,
    out: Array | None = None,
    scales: Array | None = None,
) -> tuple[Array, Array]:
    """`silu_and_mul` of [..., 2 H] and `per_token_group_quant` of it in one pass, nothing rounded
    in between.

    group_size None: one scale a row. Everything else as `per_token_group_quant`.
    """
    size = None if group_size is None else _size(group_size)
    return _grouped("silu_and_mul_quant_fp8", input, size, True, column_major_scales, out, scales)


def rmsnorm_quant_fp8(
    input: Array,
    weight: Array,
    eps: float = 1e-6,
    group_size: int | None = 128,
    *,
    residual: Array | None = None,
    column_major_scales: bool = False,
    out: Array | None = None,
    scales: Array | None = None,
) -> tuple[Array, Array]:
    """`rmsnorm` and `per_token_group_quant` of it in one pass, nothing rounded in between.

    residual: as input; in place residual += input, rounded to its dtype, and the norm is that of
    the sum, as in `fused_add_rmsnorm`, but input stays as it is. group_size None: one scale a row.
    Everything else as those ops.
    """
    op = "rmsnorm_quant_fp8"
    size = None if group_size is None else _size(group_size)
    out = _result(op, input, tuple(input.shape), out)
    scales = _scales(op, out, size, column_major_scales, scales)
    run = _dispatch.native(op, input)
    if run is not None:
        run(input, residual, weight, size or 0, eps, out, scales)
        return out, scales
    from . import reference

    x, r, w, to, ts = (_arrays.as_torch(t) for t in (input, residual, weight, out, scales))
    _check(op, x, to, x.shape)
    _checks.shape(op, "weight", w, x.shape[-1:], "last dimension of input")
    _checks.dtype(op, "weight", w, (_arrays.dtype_name(x), "float32"))
    _checks.contiguous_last(op, "weight", w)
    _checks.aligned(op, "weight", w)
    if r is not None:
        _checks.shape(op, "residual", r, x.shape, "as input")
        _checks.same_dtype(op, "residual", r, "input", x)
        _checks.contiguous_last(op, "residual", r)
        _checks.aligned(op, "residual", r)
    result, made = reference.rmsnorm_quant_fp8(
        x, w, eps, size, residual=r, dtype=to.dtype, compute_dtype=reference.float32()
    )
    _keep(op, result, made, to, ts)
    return out, scales


def _grouped(
    op: str,
    input: Array,
    size: int | None,
    gated: bool,
    column_major: bool,
    out: Array | None,
    scales: Array | None,
) -> tuple[Array, Array]:
    width = 2 if gated else 1
    _checks.require(
        op,
        len(input.shape) > 0 and input.shape[-1] % width == 0,
        "input's last dimension has no halves",
    )
    shape = (*tuple(input.shape)[:-1], int(input.shape[-1]) // width)
    out = _result(op, input, shape, out)
    scales = _scales(op, out, size, column_major, scales)
    run = _dispatch.native("per_token_quant_fp8", input)
    if run is not None:
        run(input, size or 0, gated, out, scales)
        return out, scales
    from . import reference

    x, to, ts = (_arrays.as_torch(t) for t in (input, out, scales))
    _check(op, x, to, shape)
    define = reference.silu_and_mul_quant_fp8 if gated else reference.per_token_group_quant
    result, made = define(x, size, dtype=to.dtype, compute_dtype=reference.float32())
    _keep(op, result, made, to, ts)
    return out, scales


def _size(group_size: int) -> int:
    if group_size not in _GROUPS:
        raise ValueError(f"group_size is {group_size}, expected 64 or 128")
    return group_size


def _format() -> str:
    return "float8_e4m3fnuz" if _loader.backend == "rocm" else "float8_e4m3fn"


def _result(op: str, input: Array, shape: tuple[int, ...], out: Array | None) -> Array:
    _checks.dtype(op, "input", input, _checks.FLOATS)
    _checks.require(
        op,
        len(shape) >= 1 and shape[-1] % 16 == 0,
        f"input has shape {list(shape)}, not in multiples of 16",
    )
    if out is None:
        return _arrays.empty(input, shape, _format())
    _checks.dtype(op, "out", out, (_format(),))
    return out


def _scales(
    op: str, out: Array, size: int | None, column_major: bool, scales: Array | None
) -> Array:
    rows, width = tuple(int(n) for n in out.shape[:-1]), int(out.shape[-1])
    _checks.require(
        op, width % (size or 16) == 0, f"out has {width} columns, not in groups of {size}"
    )
    if scales is not None:
        _checks.require(
            op, not column_major, "column_major_scales lays out scales made here, scales are given"
        )
        return scales
    groups = width // size if size else 1
    if not column_major:
        return _arrays.empty(out, (*rows, groups), "float32")
    _checks.require(op, len(rows) == 1, "column_major_scales needs two dimensions")
    return _arrays.empty(out, (groups, *rows), "float32").T


def _check(op: str, x: Any, out: Any, shape: tuple[int, ...]) -> None:
    _checks.contiguous_last(op, "input", x)
    _checks.aligned(op, "input", x)
    _checks.shape(op, "out", out, shape, "as the values")
    _checks.contiguous_last(op, "out", out)
    _checks.aligned(
        op, "out", out, 8 if x.element_size() == 2 else 4
    )  # what a lane of the GPU's kernels writes


def _keep(op: str, result: Any, made: Any, out: Any, scales: Any) -> None:
    _checks.dtype(op, "scales", scales, ("float32",))
    _checks.shape(
        op, "scales", scales, made.shape, f"groups of {math.prod(result.shape[-1:])} columns"
    )
    out.copy_(result)
    scales.copy_(made)
