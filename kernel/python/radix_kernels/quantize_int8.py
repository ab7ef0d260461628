"""Quantization to INT8, a scale a row, as `linear` has it for packed weights of the kind `w8a8`.

scale = largest absolute value / 127; code = round(value * (127 / largest)), to nearest even. A row
of zeros has scale 0; one with a NaN or an infinity has scale NaN; both have codes of 0. Values and
scales are computed in float32.
"""

from __future__ import annotations

from typing import Any

from . import _arrays, _checks, _dispatch
from ._arrays import Array, torch_views
from ._checks.quantize import check_norm, check_scales, check_values
from ._lazy import reference

_CODES = "int8"


def per_token_quant_int8(
    input: Array, *, out: Array | None = None, scales: Array | None = None
) -> tuple[Array, Array]:
    """(codes, scales [..., 1]) with one scale per row.

    input: [..., H] bfloat16, float16 or float32, H a multiple of 16, rows at multiples of 16 bytes.
    out: as input, int8; rows at multiples of the bytes of 8 codes. scales: float32, any strides.
    Errors: TypeError (dtype), ValueError (shape, stride, alignment).
    """
    return _quantize_rows("per_token_quant_int8", input, gated=False, out=out, scales=scales)


def silu_and_mul_quant_int8(
    input: Array, *, out: Array | None = None, scales: Array | None = None
) -> tuple[Array, Array]:
    """`silu_and_mul` of [..., 2 H] and `per_token_quant_int8` of it in one pass, nothing rounded in
    between. Everything else as there."""
    return _quantize_rows("silu_and_mul_quant_int8", input, gated=True, out=out, scales=scales)


def rmsnorm_quant_int8(
    input: Array,
    weight: Array,
    eps: float = 1e-6,
    *,
    residual: Array | None = None,
    out: Array | None = None,
    scales: Array | None = None,
) -> tuple[Array, Array]:
    """`rmsnorm` and `per_token_quant_int8` of it in one pass, nothing rounded in between.

    residual: as input; in place residual += input, and the norm is that of the sum before it is
    rounded to residual's dtype, as in `fused_add_rmsnorm`, but input stays as it is. Everything
    else as those ops.
    """
    op = "rmsnorm_quant_int8"
    out = _result(op, input, _arrays.shape(input), out)
    scales = _scales(out, scales)
    run = _dispatch.native(op, input)
    if run is not None:
        run(input, residual, weight, eps, out, scales)
        return out, scales
    x, added, w, target, kept = torch_views(input, residual, weight, out, scales)
    check_values(op, x, target, x.shape)
    check_norm(op, x, w, added)
    result, made = reference.rmsnorm_quant_int8(
        x, w, eps, residual=added, compute_dtype=reference.float32()
    )
    _keep(op, result, made, target, kept)
    return out, scales


def _quantize_rows(
    op: str, input: Array, *, gated: bool, out: Array | None, scales: Array | None
) -> tuple[Array, Array]:
    """(codes, scales) of input, gated: of `silu_and_mul` of it."""
    halves = 2 if gated else 1
    given = _arrays.shape(input)
    _checks.require(
        op,
        len(given) > 0 and given[-1] % halves == 0,
        "input's last dimension has no halves",
    )
    shape = (*given[:-1], given[-1] // halves)
    out = _result(op, input, shape, out)
    scales = _scales(out, scales)
    run = _dispatch.native("per_token_quant_int8", input)
    if run is not None:
        run(input, gated, out, scales)
        return out, scales
    x, target, kept = torch_views(input, out, scales)
    check_values(op, x, target, shape)
    define = reference.silu_and_mul_quant_int8 if gated else reference.per_token_quant_int8
    result, made = define(x, compute_dtype=reference.float32())
    _keep(op, result, made, target, kept)
    return out, scales


def _result(op: str, input: Array, shape: tuple[int, ...], out: Array | None) -> Array:
    _checks.dtype(op, "input", input, _checks.FLOATS)
    _checks.require(
        op,
        len(shape) >= 1 and shape[-1] % 16 == 0,
        f"input has shape {list(shape)}, not in multiples of 16",
    )
    if out is None:
        return _arrays.empty(input, shape, _CODES)
    _checks.dtype(op, "out", out, (_CODES,))
    return out


def _scales(out: Array, scales: Array | None) -> Array:
    if scales is not None:
        return scales
    rows = tuple(int(n) for n in out.shape[:-1])
    return _arrays.empty(out, (*rows, 1), "float32")


def _keep(op: str, result: Any, made: Any, out: Any, scales: Any) -> None:
    check_scales(op, scales, made.shape, int(result.shape[-1]))
    out.copy_(result)
    scales.copy_(made)
