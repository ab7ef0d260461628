"""Argument checks of FP8 and INT8 products, for the reference and Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _checks
from .._arrays import dtype_name

_BLOCK = 128
_INT8 = ("int8",)
# As far as a sum of products of codes stays within 32 bits; with a zero point a difference of codes
# reaches 255.
_MOST_INT8 = 131056
_MOST_INT8_SHIFTED = 65792


def check_ranks(op: str, ndim: int, dtypes: Sequence[str] = _checks.FP8, **tensors: Any) -> None:
    """TypeError or ValueError unless each has that many dimensions: before any size is read."""
    for name, x in tensors.items():
        if len(getattr(x, "shape", ())) != ndim:
            _checks.dtype(op, name, x, dtypes)
            _checks.rank(op, name, x, ndim)


def check_scaled_mm(
    op: str, a: Any, b: Any, scales_a: Any, scales_b: Any, bias: Any, out: Any
) -> None:
    """TypeError or ValueError unless the tensors of `fp8_scaled_mm` fit together."""
    _check_operands(op, a, b, 16, names=("mat_a", "mat_b"))
    _check_scaled(op, a, b, scales_a, scales_b, bias, out)


def check_int8_scaled_mm(
    op: str,
    a: Any,
    b: Any,
    scales_a: Any,
    scales_b: Any,
    azp: Any,
    b_sums: Any,
    bias: Any,
    out: Any,
) -> None:
    """TypeError or ValueError unless the tensors of `int8_scaled_mm` fit together."""
    _check_operands(op, a, b, 16, names=("mat_a", "mat_b"), dtypes=_INT8)
    both = (azp is None) == (b_sums is None)
    _checks.require(op, both, "azp and b_sums are given together, or neither is")
    most = _MOST_INT8 if azp is None else _MOST_INT8_SHIFTED
    k = a.shape[1]
    text = f"mat_a has {k} columns, at most {most} keep their sums in 32 bits"
    _checks.require(op, k <= most, text)
    _check_scaled(op, a, b, scales_a, scales_b, bias, out)
    if azp is not None:
        _check_scales(op, "azp", azp, a.shape[0], "int32")
        _checks.dtype(op, "b_sums", b_sums, ("int32",))
        _checks.shape(op, "b_sums", b_sums, (b.shape[1],), "columns of mat_b")
        _checks.contiguous_last(op, "b_sums", b_sums)


def check_blockwise_scaled_mm(
    op: str, a: Any, b: Any, scales_a: Any, scales_b: Any, out: Any
) -> None:
    """TypeError or ValueError unless the tensors of `fp8_blockwise_scaled_mm` fit together."""
    _check_operands(op, a, b, _BLOCK, names=("mat_a", "mat_b"))
    rows, k = a.shape
    columns = b.shape[1]
    _checks.dtype(op, "scales_a", scales_a, ("float32",))
    _checks.shape(op, "scales_a", scales_a, (rows, k // _BLOCK), "rows, groups of 128 of mat_a")
    _checks.dtype(op, "scales_b", scales_b, ("float32",))
    blocks = (k // _BLOCK, columns // _BLOCK)
    _checks.shape(op, "scales_b", scales_b, blocks, "blocks of 128 x 128 of mat_b")
    _check_column_major(op, "scales_b", scales_b)
    _check_out(op, out, (rows, columns), "rows of mat_a, columns of mat_b")


def check_bmm(op: str, a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any) -> None:
    """TypeError or ValueError unless the tensors of `bmm_fp8` fit together."""
    _check_operands(op, a, b, 16, names=("A", "B"))
    matrices, rows, _ = a.shape
    _checks.require(op, matrices == b.shape[0], f"B has {b.shape[0]} matrices, A has {matrices}")
    _check_scales(op, "A_scale", scale_a, 1)
    _check_scales(op, "B_scale", scale_b, 1)
    expected = (matrices, rows, b.shape[2])
    _check_out(op, out, expected, "matrices, rows of A, columns of B")
    _checks.require(op, out.is_contiguous(), "out is not contiguous")


def _check_scaled(
    op: str, a: Any, b: Any, scales_a: Any, scales_b: Any, bias: Any, out: Any
) -> None:
    """What a product of a [M, K] and b [K, N] takes besides: scales of rows and columns, a bias."""
    rows = a.shape[0]
    columns = b.shape[1]
    _check_scales(op, "scales_a", scales_a, rows)
    _check_scales(op, "scales_b", scales_b, columns)
    _check_out(op, out, (rows, columns), "rows of mat_a, columns of mat_b")
    if bias is not None:
        _checks.dtype(op, "bias", bias, (dtype_name(out), "float32"))
        _checks.shape(op, "bias", bias, (columns,), "columns of mat_b")
        _checks.contiguous_last(op, "bias", bias)


def _check_operands(
    op: str,
    a: Any,
    b: Any,
    multiple: int,
    names: tuple[str, str],
    dtypes: Sequence[str] = _checks.FP8,
) -> None:
    """Both of one of the dtypes, a [.., K] with rows and b [.., K, N] with columns of whole
    pieces."""
    name_a, name_b = names
    for name, x in ((name_a, a), (name_b, b)):
        _checks.dtype(op, name, x, dtypes)
        size = x.shape[-1]
        _checks.require(
            op,
            size % multiple == 0 and size > 0,
            f"{name} has shape {list(x.shape)}: not in {multiple}s",
        )
    _checks.same_dtype(op, name_b, b, name_a, a)
    _checks.contiguous_last(op, name_a, a)
    _checks.require(
        op,
        b.shape[-2] == a.shape[-1],
        f"{name_b} has {b.shape[-2]} rows, {name_a} {a.shape[-1]} columns",
    )
    _check_column_major(op, name_b, b)
    _checks.aligned(op, name_a, a)
    _checks.aligned(op, name_b, b.mT)


def _check_column_major(op: str, name: str, x: Any) -> None:
    unit = x.shape[-2] <= 1 or x.stride(-2) == 1
    _checks.require(op, unit, f"{name} is not column-major: stride(-2) is {x.stride(-2)}")


def _check_scales(op: str, name: str, scales: Any, count: int, dtype: str = "float32") -> None:
    _checks.dtype(op, name, scales, (dtype,))
    long_dimensions = [size for size in scales.shape if size != 1]
    _checks.require(
        op,
        long_dimensions in ([], [count]),
        f"{name} has shape {list(scales.shape)}, expected [1] or [{count}]",
    )


def _check_out(op: str, out: Any, shape: tuple[int, ...], why: str) -> None:
    _checks.shape(op, "out", out, shape, why)
    _checks.contiguous_last(op, "out", out)
    _checks.aligned(op, "out", out)
