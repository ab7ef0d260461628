"""The FP8 format of the chip, and weights in it.

Both formats have a sign, four bits of exponent and three of mantissa. OCP's `float8_e4m3fn`, in
which checkpoints are written, has a bias of 7, -0, and NaN as 0x7f and 0xff. `float8_e4m3fnuz`, all
that AMD's MI300 (gfx940 to gfx942) multiplies, has a bias of 8, one zero, and NaN as 0x80: the same
bits stand for half the value.
"""

from __future__ import annotations

from typing import Any

from . import _checks, _dispatch, _loader
from ._arrays import Array, torch_views
from ._lazy import torch

OCP = "float8_e4m3fn"
FNUZ = "float8_e4m3fnuz"

_MINUS_ZERO = 0x80  # of OCP's format
_NAN = 0x7F  # of OCP's format, but for the sign
_FNUZ_NAN = 0x80


def fp8_format() -> str:
    """The FP8 dtype that quantization makes on the current device and its instructions multiply:
    `float8_e4m3fnuz` on MI300 (gfx94x), `float8_e4m3fn` everywhere else."""
    if _loader.backend == "rocm" and _dispatch.isa().startswith("gfx94"):
        return FNUZ
    return OCP


def native_fp8(weight: Array, scale: Array) -> tuple[Any, Any]:
    """(weight, scale), FP8 codes of OCP's format, in `fp8_format()`: torch tensors.

    weight: float8_e4m3fn of any shape; scale: float32, of any shape, what the weight's values are
    multiplied with. Where the formats are the same these are the very tensors. In the other the
    codes keep their bits and the scales are doubled, which is exact: new tensors, with -0 as 0 and
    NaN as NaN. An input that was given a scale of its own (`input_scale` in checkpoints) doubles
    it alike. Errors: TypeError (dtype).
    """
    op = "native_fp8"
    weight, scale = torch_views(weight, scale)
    _checks.dtype(op, "weight", weight, (OCP,))
    _checks.dtype(op, "scale", scale, ("float32",))
    if fp8_format() == OCP:
        return weight, scale
    bits = weight.view(torch.uint8)
    nan = (bits & _NAN) == _NAN
    converted = bits.masked_fill(bits == _MINUS_ZERO, 0).masked_fill_(nan, _FNUZ_NAN)
    return converted.view(getattr(torch, FNUZ)), scale * 2
