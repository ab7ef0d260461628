"""MXFP4 in GGUF files: blocks of 32 inputs, each a byte with the power of two and 16 bytes with the
floats, those of the first 16 inputs in the low halves and of the others in the high halves."""

from typing import Any

import numpy as np
import torch

from .. import ops
from .mxfp4 import BLOCK, check_exponent, half_powers, twice

KIND = "MXFP4"  # ggml's name
_SIZE = 17  # bytes of a block


def unpack_mxfp4(blocks: np.ndarray) -> ops.GgufArguments:
    """Whole rows, uint8 [N, bytes of a row]: integers that are twice the floats, int8 [N, K], and
    half of each block's power of two as their scale, float32 [N, K / 32]. Raises ValueError for a
    power with which a weight is not finite."""
    parts = torch.from_numpy(np.array(blocks)).unflatten(1, (-1, _SIZE))
    exponents = parts[:, :, 0]
    check_exponent(int(exponents.max()))
    floats = parts[:, :, 1:]
    halves = torch.cat((twice(floats & 15), twice(floats >> 4)), dim=2)
    return ops.GgufArguments(
        w=halves.flatten(1), scales=half_powers(exponents), kind="int8", mins=None, group=BLOCK
    )


def dequantize_mxfp4(blocks: np.ndarray) -> Any:
    """The same rows as float32 [N, K]; every value is exact. Raises ValueError as unpack_mxfp4
    does."""
    found = unpack_mxfp4(blocks)
    values = found["w"].float().unflatten(1, (-1, BLOCK)) * found["scales"][..., None]
    return values.flatten(1)
