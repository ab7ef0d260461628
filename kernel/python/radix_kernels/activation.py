"""Gated activations: SwiGLU and GEGLU (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

from . import _arrays, _checks, _dispatch
from ._arrays import Array, torch_views
from ._checks.activation import check_gated
from ._lazy import reference


def silu_and_mul(input: Array, *, out: Array | None = None) -> Array:
    """`out = silu(input[..., :I]) * input[..., I:]` with `silu(x) = x / (1 + exp(-x))`.

    input: [..., 2I] bfloat16, float16 or float32; rows may be strided, the last dimension is
    contiguous. out: [..., I] of input's dtype. Computed in float32, rounded once. Returns out.
    Tolerance to the float64 reference: docs/numerics.md. Errors: TypeError, ValueError.
    """
    return _gated("silu_and_mul", input, out)


def gelu_and_mul(input: Array, *, out: Array | None = None) -> Array:
    """`out = gelu(input[..., :I]) * input[..., I:]`, `gelu(x) = x/2 (1 + erf(x / sqrt 2))`.

    Shapes, dtypes, rounding and errors as `silu_and_mul`.
    """
    return _gated("gelu_and_mul", input, out)


def gelu_tanh_and_mul(input: Array, *, out: Array | None = None) -> Array:
    """`gelu_and_mul` with `gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x**3)))`.

    Shapes, dtypes, rounding and errors as `silu_and_mul`.
    """
    return _gated("gelu_tanh_and_mul", input, out)


def _gated(op: str, input: Array, out: Array | None) -> Array:
    run = _dispatch.native(op, input)
    if out is None:
        shape = tuple(input.shape)
        _checks.require(op, len(shape) >= 1, "input has 0 dimensions, expected at least 1")
        out = _arrays.empty(input, (*shape[:-1], shape[-1] // 2))
    if run is not None:
        run(input, out)
        return out
    x, o = torch_views(input, out)
    check_gated(op, x, o)
    getattr(reference, op)(x, out=o, compute_dtype=reference.float32())
    return out
