"""Argument checks of the FP8 products, for the reference and Triton."""

from __future__ import annotations

from typing import Any

from .. import _checks
from .._arrays import dtype_name

_BLOCK = 128


def check_ranks(op: str, ndim: int, **tensors: Any) -> None:
    """TypeError or ValueError unless each has that many dimensions: before any size is read."""
    for name, x in tensors.items():
        if len(getattr(x, "shape", ())) != ndim:
            _checks.dtype(op, name, x, _checks.FP8)
            _checks.rank(op, name, x, ndim)


def check_scaled_mm(
    op: str, a: Any, b: Any, scales_a: Any, scales_b: Any, bias: Any, out: Any
) -> None:
    """TypeError or ValueError unless the tensors of `fp8_scaled_mm` fit together."""
    _check_operands(op, a, b, 16, names=("mat_a", "mat_b"))
    rows = a.shape[0]
    columns = b.shape[1]
    _check_scales(op, "scales_a", scales_a, rows)
    _check_scales(op, "scales_b", scales_b, columns)
    _check_out(op, out, (rows, columns), "rows of mat_a, columns of mat_b")
    if bias is not None:
        _checks.dtype(op, "bias", bias, (dtype_name(out), "float32"))
        _checks.shape(op, "bias", bias, (columns,), "columns of mat_b")
        _checks.contiguous_last(op, "bias", bias)


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


def _check_operands(op: str, a: Any, b: Any, multiple: int, names: tuple[str, str]) -> None:
    """Both FP8 of one format, a [.., K] with rows and b [.., K, N] with columns of whole pieces."""
    name_a, name_b = names
    for name, x in ((name_a, a), (name_b, b)):
        _checks.dtype(op, name, x, _checks.FP8)
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


def _check_scales(op: str, name: str, scales: Any, count: int) -> None:
    _checks.dtype(op, name, scales, ("float32",))
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
