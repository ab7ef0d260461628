"""Dense products with fused epilogues (Hopper and the CPU; elsewhere torch), FP8 and INT8 products
(Hopper; with scales of rows also Ampere, Ada and Blackwell; on other GPUs Triton).

A weight stays as it is stored, [N, K] row-major: the vendor's BLAS reads the same bytes where it is
the better choice.
"""

from __future__ import annotations

from typing import Any

from . import _arrays, _checks, _dispatch
from ._arrays import Array, torch_views
from ._checks.gemm import (
    check_blockwise_scaled_mm,
    check_bmm,
    check_int8_scaled_mm,
    check_ranks,
    check_scaled_mm,
)
from ._lazy import reference
from ._products import GATE_HALVES, GATE_INTERLEAVED, hopper_kernel, run_hopper, run_packed, widened
from .activation import silu_and_mul
from .codes_layout import CODES_LAYOUT
from .linear import linear
from .packed_weight import PackedWeight, is_packed


def linear_silu_and_mul(
    x: Array,
    weight: PackedWeight | Array,
    *,
    interleaved: bool = False,
    keep_x: bool = False,
    out: Array | None = None,
) -> Array:
    """`out = silu(gate) * up` with `gate, up` from `x @ weight.T`, in one pass on Hopper, for
    packed weights on the CPU and for quantized ones on a GPU.

    x: [..., K] bfloat16, float16 or float32, last dimension contiguous; weight: [2 F, K] of x's
    dtype or a PackedWeight of it: gate rows, then up rows, or with interleaved gate row 2j and up
    row 2j + 1. out: [..., F] of x's dtype. keep_x: as in `linear`. Fused, nothing is rounded before
    the product of the two; otherwise this is `linear` and then `silu_and_mul`, which rounds gate
    and up as well. Hopper's fused kernel needs F in multiples of 8, K in multiples of 8, rows at 16
    bytes; the CPU's needs F in multiples of 16 unless interleaved. Bits of a row: as `linear`.
    Errors: TypeError (dtype), ValueError (shape, stride).
    """
    op = "linear_silu_and_mul"
    _checks.dtype(op, "x", x, _checks.FLOATS)
    rows = int(_arrays.shape(weight)[0])
    _checks.require(
        op, rows % 2 == 0, f"weight has {rows} rows, expected gate and up rows of one number"
    )
    features = rows // 2
    shape = (*tuple(x.shape)[:-1], features)
    gate = GATE_INTERLEAVED if interleaved else GATE_HALVES
    if out is None:
        out = _arrays.empty(x, shape)
    weight = widened(op, x, weight)
    run = hopper_kernel(x, weight, out=out, gated=True) if features % 8 == 0 else None
    if run is not None:
        run_hopper(run, x, weight, None, None, gate, out)
        return out
    if is_packed(weight) and (interleaved or features % 16 == 0 or weight.layout == CODES_LAYOUT):
        return run_packed(op, x, weight, gate=gate, keep_x=keep_x, out=out)
    both, target = torch_views(linear(x, weight, keep_x=keep_x), out)
    _checks.shape(op, "out", target, shape, "rows of x, half of weight's")
    _checks.same_dtype(op, "out", target, "x", both)
    if interleaved:
        both = both.unflatten(-1, (features, 2)).transpose(-1, -2).flatten(-2)
    silu_and_mul(both, out=target)
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
    bfloat16 (default) or float16. out: [M, N] of it; returned. K and N are multiples of 16; rows of
    mat_a, columns of mat_b and rows of out begin at multiples of 16 bytes.

    static_weight: True promises that no kernel in flight still writes mat_b, whose first bytes may
    then be fetched while the preceding kernel still runs. fast_accum: True allows sums that the
    tensor cores keep to about 14 bits over all of K, which is faster above 128 rows on Hopper; what
    they lose grows with K (docs/numerics.md). Otherwise products on Hopper are exact, sums over 128
    of K keep about 14 bits in the tensor cores and go on in float32, rounded once; a row's bits
    depend on neither the other rows nor M within 1 .. 16, 17 .. 64, 65 .. 128 and above. Both
    change nothing on sm_89, where sums are Hopper's, and on sm_100, where the tensor cores keep
    them over all of K; a row's bits depend on neither the other rows nor M there. e4m3fnuz, scales
    with a step on sm_100, and every product on other GPUs are Triton's. Errors: TypeError (dtype),
    ValueError (shape, stride, alignment). Named after sgl_kernel's function.
    """
    op = "fp8_scaled_mm"
    check_ranks(op, 2, mat_a=mat_a, mat_b=mat_b)
    out = _result(op, mat_a, (mat_a.shape[0], mat_b.shape[1]), out_dtype, out)

    def checked() -> tuple[Any, ...]:
        tensors = torch_views(mat_a, mat_b, scales_a, scales_b, bias, out)
        check_scaled_mm(op, *tensors)
        return tensors

    def call(run: _dispatch.Native, bound: bool) -> None:
        if bound:
            run(mat_a, mat_b, scales_a, scales_b, bias, 0, static_weight, fast_accum, out)
        else:
            run(*checked())

    if not _dispatch.attempt(op, mat_a, call):
        a, b, scale_a, scale_b, added, target = checked()
        reference.fp8_scaled_mm(
            a,
            b,
            scale_a,
            scale_b,
            target.dtype,
            added,
            out=target,
            compute_dtype=reference.float32(),
        )
    return out


def int8_scaled_mm(
    mat_a: Array,
    mat_b: Array,
    scales_a: Array,
    scales_b: Array,
    out_dtype: Any = None,
    bias: Array | None = None,
    *,
    azp: Array | None = None,
    b_sums: Array | None = None,
    static_weight: bool = False,
    out: Array | None = None,
) -> Array:
    """`out = scales_a * scales_b * (mat_a @ mat_b - azp * b_sums) + bias` of int8 operands. The
    difference is exact, in int32; what follows is float32, rounded once.

    mat_a: int8 [M, K], last dimension contiguous. mat_b: int8 [K, N] column-major, the transposed
    view `w.t()` of a weight [N, K]. scales_a: float32 [M], [M, 1] or one element; scales_b: float32
    [N], [1, N] or one element. azp, b_sums: of activations with zero points, int32: azp [M], [M, 1]
    or one element is the code of a row that stands for zero, -128 .. 127 (others are not looked
    for); b_sums [N] are the sums of mat_b's columns. bias, out_dtype, out, static_weight and
    alignment: as `fp8_scaled_mm`. K and N are multiples of 16, K at most 131,056, with azp 65,792:
    beyond, a sum may pass 32 bits.

    On Hopper a row's bits depend on neither the other rows nor M within 1 .. 64 and above, on sm_80
    to sm_89 neither on the other rows nor on M. Other GPUs run Triton's kernel. Errors: TypeError
    (dtype), ValueError (shape, stride, alignment).
    """
    op = "int8_scaled_mm"
    check_ranks(op, 2, ("int8",), mat_a=mat_a, mat_b=mat_b)
    out = _result(op, mat_a, (mat_a.shape[0], mat_b.shape[1]), out_dtype, out)

    def checked() -> tuple[Any, ...]:
        tensors = torch_views(mat_a, mat_b, scales_a, scales_b, azp, b_sums, bias, out)
        check_int8_scaled_mm(op, *tensors)
        return tensors

    def call(run: _dispatch.Native, bound: bool) -> None:
        if bound:
            run(mat_a, mat_b, scales_a, scales_b, azp, b_sums, bias, 0, static_weight, out)
        else:
            run(*checked())

    if not _dispatch.attempt(op, mat_a, call):
        a, b, scale_a, scale_b, zeros, sums, added, target = checked()
        reference.int8_scaled_mm(
            a,
            b,
            scale_a,
            scale_b,
            target.dtype,
            added,
            azp=zeros,
            b_sums=sums,
            out=target,
            compute_dtype=reference.float32(),
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
    check_ranks(op, 2, mat_a=mat_a, mat_b=mat_b)
    out = _result(op, mat_a, (mat_a.shape[0], mat_b.shape[1]), out_dtype, out)

    def checked() -> tuple[Any, ...]:
        tensors = torch_views(mat_a, mat_b, scales_a, scales_b, out)
        check_blockwise_scaled_mm(op, *tensors)
        return tensors

    def call(run: _dispatch.Native, bound: bool) -> None:
        if bound:
            run(mat_a, mat_b, scales_a, scales_b, static_weight, out)
        else:
            run(*checked())

    if not _dispatch.attempt(op, mat_a, call):
        a, b, scale_a, scale_b, target = checked()
        reference.fp8_blockwise_scaled_mm(
            a,
            b,
            scale_a,
            scale_b,
            target.dtype,
            out=target,
            compute_dtype=reference.float32(),
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
    check_ranks(op, 3, A=A, B=B)
    out = _result(op, A, (A.shape[0], A.shape[1], B.shape[2]), dtype, out)

    def checked() -> tuple[Any, ...]:
        tensors = torch_views(A, B, A_scale, B_scale, out)
        check_bmm(op, *tensors)
        return tensors

    def call(run: _dispatch.Native, bound: bool) -> None:
        if bound:
            run(A, B, A_scale, B_scale, out)
        else:
            run(*checked())

    if not _dispatch.attempt(op, A, call):
        a, b, scale_a, scale_b, target = checked()
        reference.bmm_fp8(
            a, b, scale_a, scale_b, target.dtype, target, compute_dtype=reference.float32()
        )
    return out


def _result(op: str, like: Array, shape: tuple[Any, ...], dtype: Any, out: Array | None) -> Array:
    name = None if dtype is None else str(dtype).rpartition(".")[2]
    if name is not None and name not in _checks.HALVES:
        expected = " or ".join(_checks.HALVES)
        raise TypeError(f"{op}: the result's dtype is {name}, expected {expected}")
    if out is None:
        return _arrays.empty(like, tuple(int(size) for size in shape), name or "bfloat16")
    _checks.dtype(op, "out", out, _checks.HALVES)
    if name is not None and _arrays.dtype_name(out) != name:
        raise TypeError(f"{op}: out has dtype {_arrays.dtype_name(out)}, expected {name}")
    return out
