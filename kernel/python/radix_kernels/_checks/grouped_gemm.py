"""Argument checks of the grouped products, whatever runs them."""

from __future__ import annotations

from typing import Any

from .. import _checks
from .._arrays import dtype_name

SCALE_BLOCK = 128


def check_grouped(
    op: str,
    rank: int,
    groups_name: str,
    x: Any,
    weight: Any,
    groups: Any,
    x_scale: Any,
    weight_scale: Any,
) -> None:
    """TypeError or ValueError unless x of that rank, the weights, what says the rows' groups (by
    its name in the call) and the scales fit together."""
    _checks.dtype(op, "x", x, (*_checks.FLOATS, *_checks.FP8))
    _checks.rank(op, "x", x, rank)
    _checks.contiguous_last(op, "x", x)
    _checks.rank(op, "weight", weight, 3)
    _checks.same_dtype(op, "weight", weight, "x", x)
    _checks.dtype(op, groups_name, groups, ("int32",))
    k = weight.shape[2]
    _checks.require(op, x.shape[-1] == k, f"x has rows of {x.shape[-1]}, expected {k} as weight")
    fp8 = dtype_name(x) in _checks.FP8
    _checks.require(op, (x_scale is not None) == fp8, "x_scale goes with FP8")
    _checks.require(op, (weight_scale is not None) == fp8, "weight_scale goes with FP8")
    contiguous = [("weight", weight), (groups_name, groups)]
    if fp8:
        _check_scales(op, x, weight, x_scale, weight_scale)
        contiguous += [("x_scale", x_scale), ("weight_scale", weight_scale)]
    for name, tensor in contiguous:
        _checks.require(op, tensor.is_contiguous(), f"{name} is not contiguous")


def check_output(op: str, x: Any, weight: Any, out: Any) -> None:
    """TypeError or ValueError unless out is the result of x by weight."""
    name = dtype_name(x)
    expected = "bfloat16" if name in _checks.FP8 else name
    shape = (*x.shape[:-1], weight.shape[1])
    _checks.shape(op, "out", out, shape, "rows of x, columns of weight")
    _checks.dtype(op, "out", out, (expected,))
    _checks.contiguous_last(op, "out", out)


def _check_scales(op: str, x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> None:
    experts, n, k = weight.shape
    blocks = -(-k // SCALE_BLOCK)
    for name, scale, expected in (
        ("x_scale", x_scale, (*x.shape[:-1], blocks)),
        ("weight_scale", weight_scale, (experts, -(-n // SCALE_BLOCK), blocks)),
    ):
        _checks.dtype(op, name, scale, ("float32",))
        why = "one a row and 128 of K; one a block of 128 x 128"
        _checks.shape(op, name, scale, expected, why)
