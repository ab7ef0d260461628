"""Argument checks of the norms, for the reference."""

from __future__ import annotations

from typing import Any

from .. import _checks
from .._arrays import dtype_name


def check_rmsnorm(op: str, x: Any, weight: Any, out: Any) -> None:
    """TypeError or ValueError unless the tensors of `rmsnorm` fit together."""
    _check_input(op, x)
    _check_row(op, "weight", weight, x)
    _check_out(op, out, x)


def check_fused_add_rmsnorm(op: str, x: Any, residual: Any, weight: Any) -> None:
    """TypeError or ValueError unless the tensors of `fused_add_rmsnorm` fit together."""
    _check_input(op, x)
    _check_row(op, "weight", weight, x)
    _checks.shape(op, "residual", residual, x.shape, "as input")
    _checks.same_dtype(op, "residual", residual, "input", x)
    _checks.contiguous_last(op, "residual", residual)


def check_layernorm(op: str, x: Any, weight: Any, bias: Any, out: Any) -> None:
    """TypeError or ValueError unless the tensors of `layernorm` fit together."""
    _check_input(op, x)
    for name, row in (("weight", weight), ("bias", bias)):
        if row is not None:
            _check_row(op, name, row, x)
    _check_out(op, out, x)


def _check_input(op: str, x: Any) -> None:
    _checks.dtype(op, "input", x, _checks.FLOATS)
    _checks.require(op, x.ndim >= 1, "input has 0 dimensions, expected at least 1")
    _checks.contiguous_last(op, "input", x)


def _check_row(op: str, name: str, row: Any, x: Any) -> None:
    _checks.dtype(op, name, row, _checks.FLOATS)
    _checks.shape(op, name, row, x.shape[-1:], "last dimension of input")
    if row.dtype != x.dtype and dtype_name(row) != "float32":
        raise TypeError(f"{op}: {name} has dtype {row.dtype}, expected {x.dtype} or float32")


def _check_out(op: str, out: Any, x: Any) -> None:
    _checks.shape(op, "out", out, x.shape, "as input")
    _checks.same_dtype(op, "out", out, "input", x)
