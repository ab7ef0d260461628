"""Dense products with fused ends (Hopper; elsewhere torch) and FP8 products (Hopper; on other GPUs
Triton).

A weight stays as it is stored, [N, K] row-major: the vendor's BLAS reads the same bytes where it is
the better choice.
"""

from __future__ import annotations

from typing import Any

from . import _arrays, _checks, _dispatch
from ._arrays import Array
from .activation import silu_and_mul
from .linear import fused_product, linear, linear_packed, run_fused
from .packed_weight import PackedWeight, is_packed

_GATE = {False: 1, True: 2}
_HALVES = ("bfloat16", "float16")
_BLOCK = 128


def linear_silu_and_mul(
    x: Array, weight: PackedWeight | Array, *, interleaved: bool = False, out: Array | None = None
) -> Array:
    """`out = silu(gate) * up` with `gate, up` from `x @ weight.T`, in one pass on Hopper and for
    packed weights on the CPU.

    x: [..., K] bfloat16, float16 or float32, last dimension contiguous; weight: [2 F, K] of x's
    dtype or a PackedWeight of it: gate rows, then up rows, or with interleaved gate row 2j and up
    row 2j + 1. out: [..., F] of x's dtype. Fused, nothing is rounded before the product of the two;
    otherwise this is `linear` and then `silu_and_mul`, which rounds gate and up as well. Hopper's
    fused kernel needs F in multiples of 8, K in multiples of 8, rows at 16 bytes; the CPU's needs F
    in multiples of 16 unless interleaved. Bits of a row: as `linear`. Errors: TypeError (dtype),
    ValueError (shape, stride).
    """
    op = "linear_silu_and_mul"
    _checks.dtype(op, "x", x, _checks.FLOATS)
    rows = int(weight.shape[0])
    _checks.require(
        op, rows % 2 == 0, f"weight has {rows} rows, expected gate and up rows of one number"
    )
    features = rows // 2
    if out is None:
        out = _arrays.empty(x, (*tuple(x.shape)[:-1], features))
    run = fused_product(x, weight, out=out, gated=True) if features % 8 == 0 else None
    if run is not None:
        run_fused(run, x, weight, None, None, _GATE[interleaved], out)
        return out
    if is_packed(weight) and (interleaved or features % 16 == 0):
        return linear_packed(op, x, weight, gate=_GATE[interleaved], out=out)
    both, to = _arrays.as_torch(linear(x, weight)), _arrays.as_torch(out)
    _checks.shape(op, "out", to, (*tuple(x.shape)[:-1], features), "rows of x, half of weight's")
    _checks.same_dtype(op, "out", to, "x", both)
    if interleaved:
        both = both.unflatten(-1, (features, 2)).transpose(-1, -2).flatten(-2)
    silu_and_mul(both, out=to)
    return out


def fp8_scaled_mm(
    mat_a: Array,
    mat_b: Array,
    scales_a: Array,
    scales_b: Array,
    out_dtype: Any = None,
    bias: Array | None = None,
    *,
    static_weight: bool = False,
    fast_accum: bool = False,
    out: Array | None = None,
) -> Array:
    """`out = (mat_a * scales_a) @ (mat_b * scales_b) + bias` of FP8 operands.

    Both are float8_e4m3fn, or both float8_e4m3fnuz (what quantization makes on ROCm). mat_a: [M,
    K], last dimension contiguous. mat_b: [K, N] column-major, the transposed view `w.t()` of a
    weight [N, K]. scales_a: float32 [M], [M, 1] or one element; scales_b: float32 [N], [1, N] or
    one element. bias: [N] of the result's dtype or float32. out_dtype: a torch dtype or its name,
    bfloat16 (default) or float16. out: [M, N] of it. K and N are multiples of 16; rows of mat_a,
    columns of mat_b and rows of out begin at multiples of 16 bytes. static_weight: True promises
    that no kernel in flight still writes mat_b, whose first bytes may then be fetched while the
    kernel ahead still runs. fast_accum: True allows sums that the tensor cores keep to about 14
    bits over all of K, which is faster above 128 rows on Hopper; what they lose grows with K
    (docs/numerics.md). On Hopper products are exact, sums over 128 of K keep about 14 bits in the
    tensor cores and go on in float32, rounded once; a row's bits depend on neither the other rows
    nor M within 1 .. 16, 17 .. 64, 65 .. 128 and above. e4m3fnuz, and every product on other GPUs,
    is Triton's. Errors: TypeError (dtype), ValueError (shape, stride, alignment). Named after
    sgl_kernel's function.
    """
    op = "fp8_scaled_mm"
    _check_ranks(op, 2, mat_a=mat_a, mat_b=mat_b)
    out = _result(op, mat_a, (mat_a.shape[0], mat_b.shape[1]), out_dtype, out)

    def checked() -> tuple[Any, ...]:
        a, b, sa, sb, tb, to = (
            _arrays.as_torch(t) for t in (mat_a, mat_b, scales_a, scales_b, bias, out)
        )
        _check_operands(op, a, b, 16)
        _check_scales(op, "scales_a", sa, a.shape[0])
        _check_scales(op, "scales_b", sb, b.shape[1])
        _check_out(op, to, (a.shape[0], b.shape[1]), "rows of mat_a, columns of mat_b")
        if tb is not None:
            _checks.dtype(op, "bias", tb, (_arrays.dtype_name(to), "float32"))
            _checks.shape(op, "bias", tb, (b.shape[1],), "columns of mat_b")
            _checks.contiguous_last(op, "bias", tb)
        return a, b, sa, sb, tb, to

    def call(run: _dispatch.Native, bound: bool) -> None:
        if bound:
            run(mat_a, mat_b, scales_a, scales_b, bias, 0, static_weight, fast_accum, out)
        else:
            run(*checked())

    if not _dispatch.attempt(op, mat_a, call):
        from . import reference

        a, b, sa, sb, tb, to = checked()
        reference.fp8_scaled_mm(
            a, b, sa, sb, to.dtype, tb, out=to, compute_dtype=reference.float32()
        )
    return out


def fp8_blockwise_scaled_mm(
    mat_a: Array,
    mat_b: Array,
    scales_a: Array,
    scales_b: Array,
    out_dtype: Any = None,
    *,
    static_weight: bool = False,
    out: Array | None = None,
) -> Array:
    """`fp8_scaled_mm` with a scale for each 1 x 128 of mat_a and each 128 x 128 of mat_b
    (DeepSeek-V3's format).

    scales_a: float32 [M, K / 128], any strides; scales_b: float32 [K / 128, N / 128], column-major,
    the transposed view of [N / 128, K / 128]. K and N are multiples of 128. Everything else as
    `fp8_scaled_mm`.
    """
    op = "fp8_blockwise_scaled_mm"
    _check_ranks(op, 2, mat_a=mat_a, mat_b=mat_b)
    out = _result(op, mat_a, (mat_a.shape[0], mat_b.shape[1]), out_dtype, out)

    def checked() -> tuple[Any, ...]:
        a, b, sa, sb, to = (_arrays.as_torch(t) for t in (mat_a, mat_b, scales_a, scales_b, out))
        _check_operands(op, a, b, _BLOCK)
        blocks = a.shape[1] // _BLOCK, b.shape[1] // _BLOCK
        for name, scales, shape, why in (
            ("scales_a", sa, (a.shape[0], blocks[0]), "rows, groups of 128 of mat_a"),
            ("scales_b", sb, blocks, "blocks of 128 x 128 of mat_b"),
        ):
            _checks.dtype(op, name, scales, ("float32",))
            _checks.shape(op, name, scales, shape, why)
        _check_column_major(op, "scales_b", sb)
        _check_out(op, to, (a.shape[0], b.shape[1]), "rows of mat_a, columns of mat_b")
        return a, b, sa, sb, to

    def call(run: _dispatch.Native, bound: bool) -> None:
        if bound:
            run(mat_a, mat_b, scales_a, scales_b, static_weight, out)
        else:
            run(*checked())

    if not _dispatch.attempt(op, mat_a, call):
        from . import reference

        a, b, sa, sb, to = checked()
        reference.fp8_blockwise_scaled_mm(
            a, b, sa, sb, to.dtype, out=to, compute_dtype=reference.float32()
        )
    return out


def bmm_fp8(
    A: Array, B: Array, A_scale: Array, B_scale: Array, dtype: Any = None, out: Array | None = None
) -> Array:
    """`out[i] = (A[i] * A_scale) @ (B[i] * B_scale)` of FP8 operands.

    A: [b, M, K]; B: [b, K, N], every matrix column-major; A_scale, B_scale: float32 of one element.
    dtype: bfloat16 (default) or float16; out: [b, M, N] of it, contiguous. Everything else as
    `fp8_scaled_mm`.
    """
    op = "bmm_fp8"
    _check_ranks(op, 3, A=A, B=B)
    out = _result(op, A, (A.shape[0], A.shape[1], B.shape[2]), dtype, out)

    def checked() -> tuple[Any, ...]:
        a, b, sa, sb, to = (_arrays.as_torch(t) for t in (A, B, A_scale, B_scale, out))
        _check_operands(op, a, b, 16, names=("A", "B"))
        _checks.require(
            op, a.shape[0] == b.shape[0], f"B has {b.shape[0]} matrices, A has {a.shape[0]}"
        )
        _check_scales(op, "A_scale", sa, 1)
        _check_scales(op, "B_scale", sb, 1)
        _check_out(
            op, to, (a.shape[0], a.shape[1], b.shape[2]), "matrices, rows of A, columns of B"
        )
        _checks.require(op, to.is_contiguous(), "out is not contiguous")
        return a, b, sa, sb, to

    def call(run: _dispatch.Native, bound: bool) -> None:
        run(A, B, A_scale, B_scale, out) if bound else run(*checked())

    if not _dispatch.attempt(op, A, call):
        from . import reference

        a, b, sa, sb, to = checked()
        reference.bmm_fp8(a, b, sa, sb, to.dtype, to, compute_dtype=reference.float32())
    return out


def _check_ranks(op: str, ndim: int, **tensors: Array) -> None:
    """Before any size is read."""
    for name, x in tensors.items():
        if len(getattr(x, "shape", ())) != ndim:
            _checks.dtype(op, name, x, _checks.FP8)
            _checks.rank(op, name, x, ndim)


def _result(op: str, like: Array, shape: tuple[Any, ...], dtype: Any, out: Array | None) -> Array:
    name = None if dtype is None else str(dtype).rpartition(".")[2]
    if name is not None and name not in _HALVES:
        raise TypeError(f"{op}: the result's dtype is {name}, expected {' or '.join(_HALVES)}")
    if out is None:
        return _arrays.empty(like, tuple(int(size) for size in shape), name or "bfloat16")
    _checks.dtype(op, "out", out, _HALVES)
    if name is not None and _arrays.dtype_name(out) != name:
        raise TypeError(f"{op}: out has dtype {_arrays.dtype_name(out)}, expected {name}")
    return out


def _check_operands(
    op: str, a: Any, b: Any, multiple: int, names: tuple[str, str] = ("mat_a", "mat_b")
) -> None:
    for name, x in zip(names, (a, b), strict=True):
        _checks.dtype(op, name, x, _checks.FP8)
        size = x.shape[-1]
        _checks.require(
            op,
            size % multiple == 0 and size > 0,
            f"{name} has shape {list(x.shape)}: not in {multiple}s",
        )
    _checks.same_dtype(op, names[1], b, names[0], a)
    _checks.contiguous_last(op, names[0], a)
    _checks.require(
        op,
        b.shape[-2] == a.shape[-1],
        f"{names[1]} has {b.shape[-2]} rows, {names[0]} {a.shape[-1]} columns",
    )
    _check_column_major(op, names[1], b)
    _checks.aligned(op, names[0], a)
    _checks.aligned(op, names[1], b.mT)


def _check_column_major(op: str, name: str, x: Any) -> None:
    unit = x.shape[-2] <= 1 or x.stride(-2) == 1
    _checks.require(op, unit, f"{name} is not column-major: stride(-2) is {x.stride(-2)}")


def _check_scales(op: str, name: str, scales: Any, count: int) -> None:
    _checks.dtype(op, name, scales, ("float32",))
    fits = [size for size in scales.shape if size != 1] in ([], [count])
    _checks.require(op, fits, f"{name} has shape {list(scales.shape)}, expected [1] or [{count}]")


def _check_out(op: str, out: Any, shape: tuple[int, ...], why: str) -> None:
    _checks.shape(op, "out", out, shape, why)
    _checks.contiguous_last(op, "out", out)
    _checks.aligned(op, "out", out)
