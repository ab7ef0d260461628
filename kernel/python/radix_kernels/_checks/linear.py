"""Argument checks of dense layers and embedding: for torch and the reference, and what a packed
weight asks of x."""

from __future__ import annotations

from typing import Any

from .. import _checks
from .._arrays import Array, as_torch, dtype_name

_LARGEST_ZERO = 16  # zero point of a 4-bit code
_LARGEST_POWER = 252  # as e8m0: with a larger one 6, the largest float, is no float32


def read_out_dtype(op: str, x: Array, out_dtype: Any, out: Array | None) -> str:
    """The name of the result's dtype, x's or float32. TypeError for another, or where out has not
    the one asked for."""
    own = dtype_name(x)
    given = own if out is None else dtype_name(out)
    name = given if out_dtype is None else str(out_dtype).rpartition(".")[2]
    if name not in (own, "float32"):
        argument = "out_dtype" if out_dtype else "out"
        raise TypeError(f"{op}: {argument} is {name}, expected {own} (as x) or float32")
    if out is not None and given != name:
        raise TypeError(f"{op}: out has dtype {given}, expected {name}")
    return name


def check_packed(op: str, x: Array, k: int, dtype: str) -> None:
    """ValueError unless x has k inputs, TypeError unless it has the packed weight's dtype."""
    if int(x.shape[-1]) != k:
        raise ValueError(
            f"{op}: x has last dimension {x.shape[-1]}, expected {k} (inputs of weight)"
        )
    if dtype_name(x) != dtype:
        raise TypeError(f"{op}: x has dtype {x.dtype}, expected {dtype} (as weight)")


def check_code_numbers(op: str, zeros: Array | None, scales: Array | None) -> None:
    """ValueError for zero points and powers of two (e8m0) that are too large, which kernels of a
    GPU would not notice; scales of other dtypes than uint8 are no powers."""
    for name, given, most in (("zeros", zeros, _LARGEST_ZERO), ("scales", scales, _LARGEST_POWER)):
        if given is None or dtype_name(given) != "uint8":
            continue
        codes = as_torch(given)
        largest = int(codes.amax()) if codes.numel() else 0
        _checks.require(
            op, largest <= most, f"{name} has the value {largest}, expected 0 to {most}"
        )


def check_linear(op: str, x: Any, weight: Any, bias: Any, residual: Any, out: Any) -> None:
    """TypeError or ValueError unless the tensors of `linear` fit together."""
    _checks.dtype(op, "x", x, _checks.FLOATS)
    _checks.rank(op, "weight", weight, 2)
    _checks.same_dtype(op, "weight", weight, "x", x)
    n, k = weight.shape
    _checks.require(
        op,
        x.shape[-1] == k,
        f"x has last dimension {x.shape[-1]}, expected {k} (inputs of weight)",
    )
    _checks.contiguous_last(op, "x", x)
    check_ends(op, x, n, bias, residual, out)


def check_ends(op: str, x: Any, n: int, bias: Any, residual: Any, out: Any) -> None:
    """TypeError or ValueError unless what meets the n results of each row of x fits."""
    shape = (*x.shape[:-1], n)
    if out is not None:
        _checks.shape(op, "out", out, shape, "rows of x, outputs of weight")
    if bias is not None:
        _checks.shape(op, "bias", bias, (n,), "outputs of weight")
        if dtype_name(bias) != "float32":
            _checks.same_dtype(op, "bias", bias, "x", x)
    if residual is not None:
        _checks.shape(op, "residual", residual, shape, "as out")
        _checks.same_dtype(op, "residual", residual, "x", x)


def check_embedding(op: str, ids: Any, k: int, dtype: str, out: Any) -> None:
    """TypeError or ValueError unless ids and out of `embedding` fit rows of k elements of dtype."""
    _checks.dtype(op, "ids", ids, _checks.INTS)
    _checks.rank(op, "ids", ids, 1)
    _checks.shape(op, "out", out, (ids.shape[0], k), "ids and columns of weight")
    if dtype_name(out) != dtype:
        raise TypeError(f"{op}: out has dtype {out.dtype}, expected {dtype} (as weight)")
