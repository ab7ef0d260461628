"""RMS normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467) and layer normalisation (Ba et
al., 2016, arXiv:1607.06450)."""

from __future__ import annotations

from . import _arrays, _dispatch
from ._arrays import Array, torch_views
from ._checks.norm import check_fused_add_rmsnorm, check_layernorm, check_rmsnorm
from ._lazy import reference


def rmsnorm(input: Array, weight: Array, eps: float = 1e-6, *, out: Array | None = None) -> Array:
    """`out = input / sqrt(mean(input**2, -1) + eps) * weight`.

    input: [..., H] bfloat16, float16 or float32; rows may be strided, the last dimension is
    contiguous. weight: [H], input's dtype or float32. out: input's shape and dtype, input
    itself or apart from it. Computed in float32, rounded once. Returns out.

    A NaN or infinity in a row reaches that row only. Rows do not depend on each other.
    Tolerance to the float64 reference: norm 1e-6 (float32), 4.9e-4 (float16), 3.95e-3 (bfloat16),
    see docs/numerics.md. Errors: TypeError (dtype), ValueError (shape, stride).
    """
    if out is None:
        out = _arrays.empty_like(input)
    run = _dispatch.native("rmsnorm", input)
    if run is not None:
        run(input, weight, eps, out)
        return out
    x, w, o = torch_views(input, weight, out)
    check_rmsnorm("rmsnorm", x, w, o)
    reference.rmsnorm(x, w, eps, out=o, compute_dtype=reference.float32())
    return out


def fused_add_rmsnorm(input: Array, residual: Array, weight: Array, eps: float = 1e-6) -> None:
    """`total = residual + input; residual = total; input = rmsnorm(total) * weight`, in place.

    input, residual: [..., H] of one dtype (bfloat16, float16, float32), rows may be strided.
    weight: [H], input's dtype or float32. The norm is that of the float32 total; what residual
    keeps is rounded once to its dtype. Tolerances and errors as `rmsnorm`.
    """
    run = _dispatch.native("fused_add_rmsnorm", input)
    if run is not None:
        run(input, residual, weight, eps)
        return
    x, r, w = torch_views(input, residual, weight)
    check_fused_add_rmsnorm("fused_add_rmsnorm", x, r, w)
    reference.fused_add_rmsnorm(x, r, w, eps, compute_dtype=reference.float32())


def layernorm(
    input: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    out: Array | None = None,
) -> Array:
    """`out = (input - mean) / sqrt(variance + eps) * weight + bias` over the last dimension, the
    variance biased.

    input: [..., H] bfloat16, float16 or float32; rows may be strided, the last dimension is
    contiguous. weight, bias: [H], input's dtype or float32; None: 1 and 0. out: input's shape and
    dtype, may be input. Computed in float32, rounded once. Returns out. Native on the CPU; on a GPU
    torch's operations run it.

    A NaN or infinity in a row reaches that row only. Rows do not depend on each other. Tolerance to
    the float64 reference: as `rmsnorm` where the result's norm is of the size of weight's and
    bias'. Errors: TypeError (dtype), ValueError (shape, stride).
    """
    op = "layernorm"
    if out is None:
        out = _arrays.empty_like(input)
    run = _dispatch.native(op, input)
    if run is not None:
        run(input, weight, bias, eps, out)
        return out
    x, w, b, o = torch_views(input, weight, bias, out)
    check_layernorm(op, x, w, b, o)
    reference.layernorm(x, w, b, eps, out=o, compute_dtype=reference.float32())
    return out
