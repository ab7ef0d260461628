"""Quantization to the FP8 of the GPU (`fp8_format`): float8_e4m3fn, on MI300 float8_e4m3fnuz.

scale = max(largest absolute value, 1e-10) / largest of the format; result = round(value / scale),
to nearest even and clamped; NaN stays NaN. Values and scales are computed in float32, so that a
value within float32's rounding of a border between two results may take either.
"""

from __future__ import annotations

from typing import Any

from . import _arrays, _checks, _dispatch
from ._arrays import Array, torch_views
from ._checks.quantize import check_given_scale, check_norm, check_scales, check_values
from ._lazy import reference
from .fp8 import fp8_format

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
    out = _result(op, input, _arrays.shape(input), out)
    run = _dispatch.native(op, input)
    if run is not None:
        if scale is None:
            scale = _arrays.empty(input, (1,), "float32")
        run(input, static, out, scale)
        return out, scale
    x, given, target = torch_views(input, scale, out)
    check_values(op, x, target, x.shape)
    if given is not None:
        check_given_scale(op, given)
    result, made = reference.per_tensor_quant_fp8(
        x, given, dtype=target.dtype, compute_dtype=reference.float32()
    )
    target.copy_(result)
    return out, made if scale is None else scale


def per_token_quant_fp8(
    input: Array, *, out: Array | None = None, scales: Array | None = None
) -> tuple[Array, Array]:
    """(result, scales [..., 1]) with one scale per row; otherwise as `per_token_group_quant`."""
    return _quantize_rows("per_token_quant_fp8", input, None, out=out, scales=scales)


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
    return _quantize_rows(
        "per_token_group_quant",
        input,
        _group_size(group_size),
        column_major=column_major_scales,
        out=out,
        scales=scales,
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

    group_size None: one scale per row. Everything else as `per_token_group_quant`.
    """
    return _quantize_rows(
        "silu_and_mul_quant_fp8",
        input,
        None if group_size is None else _group_size(group_size),
        gated=True,
        column_major=column_major_scales,
        out=out,
        scales=scales,
    )


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

    residual: as input; in place residual += input, and the norm is that of the sum before it is
    rounded to residual's dtype, as in `fused_add_rmsnorm`, but input stays as it is. group_size
    None: one scale per row. Everything else as those ops.
    """
    op = "rmsnorm_quant_fp8"
    size = None if group_size is None else _group_size(group_size)
    out = _result(op, input, _arrays.shape(input), out)
    scales = _scales(op, out, size, column_major_scales, scales)
    run = _dispatch.native(op, input)
    if run is not None:
        run(input, residual, weight, size or 0, eps, out, scales)
        return out, scales
    x, added, w, target, kept = torch_views(input, residual, weight, out, scales)
    check_values(op, x, target, x.shape)
    check_norm(op, x, w, added)
    result, made = reference.rmsnorm_quant_fp8(
        x, w, eps, size, residual=added, dtype=target.dtype, compute_dtype=reference.float32()
    )
    _keep(op, result, made, target, kept)
    return out, scales


def _quantize_rows(
    op: str,
    input: Array,
    size: int | None,
    *,
    gated: bool = False,
    column_major: bool = False,
    out: Array | None,
    scales: Array | None,
) -> tuple[Array, Array]:
    """(result, scales) with a scale for `size` columns of a row, None for all; gated: of
    `silu_and_mul` of input."""
    halves = 2 if gated else 1
    given = _arrays.shape(input)
    _checks.require(
        op,
        len(given) > 0 and given[-1] % halves == 0,
        "input's last dimension has no halves",
    )
    shape = (*given[:-1], given[-1] // halves)
    out = _result(op, input, shape, out)
    scales = _scales(op, out, size, column_major, scales)
    run = _dispatch.native("per_token_quant_fp8", input)
    if run is not None:
        run(input, size or 0, gated, out, scales)
        return out, scales
    x, target, kept = torch_views(input, out, scales)
    check_values(op, x, target, shape)
    define = reference.silu_and_mul_quant_fp8 if gated else reference.per_token_group_quant
    result, made = define(x, size, dtype=target.dtype, compute_dtype=reference.float32())
    _keep(op, result, made, target, kept)
    return out, scales


def _group_size(group_size: int) -> int:
    """group_size, checked."""
    if group_size not in _GROUPS:
        raise ValueError(f"group_size is {group_size}, expected 64 or 128")
    return group_size


def _result(op: str, input: Array, shape: tuple[int, ...], out: Array | None) -> Array:
    _checks.dtype(op, "input", input, _checks.FLOATS)
    _checks.require(
        op,
        len(shape) >= 1 and shape[-1] % 16 == 0,
        f"input has shape {list(shape)}, not in multiples of 16",
    )
    if out is None:
        return _arrays.empty(input, shape, fp8_format())
    _checks.dtype(op, "out", out, (fp8_format(),))
    return out


def _scales(
    op: str, out: Array, size: int | None, column_major: bool, scales: Array | None
) -> Array:
    rows = tuple(int(n) for n in out.shape[:-1])
    width = int(out.shape[-1])
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


def _keep(op: str, result: Any, made: Any, out: Any, scales: Any) -> None:
    check_scales(op, scales, made.shape, int(result.shape[-1]))
    out.copy_(result)
    scales.copy_(made)
