"""Argument checks of FP8 quantization, for the reference."""

from __future__ import annotations

from typing import Any

from .. import _checks
from .._arrays import dtype_name


def check_values(op: str, x: Any, out: Any, shape: tuple[int, ...]) -> None:
    """TypeError or ValueError unless x can be quantized into out of that shape."""
    _checks.contiguous_last(op, "input", x)
    _checks.aligned(op, "input", x)
    _checks.shape(op, "out", out, shape, "as the values")
    _checks.contiguous_last(op, "out", out)
    # What a lane of the GPU's kernels writes.
    _checks.aligned(op, "out", out, 8 if x.element_size() == 2 else 4)


def check_given_scale(op: str, scale: Any) -> None:
    """TypeError or ValueError unless scale is float32 of one element."""
    _checks.dtype(op, "scale", scale, ("float32",))
    _checks.require(op, scale.numel() == 1, f"scale has shape {list(scale.shape)}, expected [1]")


def check_scales(op: str, scales: Any, shape: tuple[int, ...], columns: int) -> None:
    """TypeError or ValueError unless scales is float32 of that shape, for rows of that many
    columns."""
    _checks.dtype(op, "scales", scales, ("float32",))
    _checks.shape(op, "scales", scales, shape, f"groups of {columns} columns")


def check_norm(op: str, x: Any, weight: Any, residual: Any) -> None:
    """TypeError or ValueError unless weight and residual of `rmsnorm_quant_fp8` fit x."""
    _checks.shape(op, "weight", weight, x.shape[-1:], "last dimension of input")
    _checks.dtype(op, "weight", weight, (dtype_name(x), "float32"))
    _checks.contiguous_last(op, "weight", weight)
    _checks.aligned(op, "weight", weight)
    if residual is not None:
        _checks.shape(op, "residual", residual, x.shape, "as input")
        _checks.same_dtype(op, "residual", residual, "input", x)
        _checks.contiguous_last(op, "residual", residual)
        _checks.aligned(op, "residual", residual)
