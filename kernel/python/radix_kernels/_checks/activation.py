"""Argument checks of the gated activations, for the reference."""

from __future__ import annotations

from typing import Any

from .. import _checks


def check_gated(op: str, x: Any, out: Any) -> None:
    """TypeError or ValueError unless out has half of x's last dimension."""
    _checks.dtype(op, "input", x, _checks.FLOATS)
    size = x.shape[-1]
    _checks.require(op, size % 2 == 0, f"input has last dimension {size}, expected an even one")
    _checks.contiguous_last(op, "input", x)
    _checks.shape(op, "out", out, (*x.shape[:-1], size // 2), "half of input's last")
    _checks.same_dtype(op, "out", out, "input", x)
