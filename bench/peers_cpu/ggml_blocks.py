"""Random weights in the blocks of ggml's types. The layouts are those of ggml's header
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

_COUNT = 1 << 24  # of random weights, which matrices are stretches of
_SPREAD = np.float32(0.02)
_BLOCK = 32  # weights of a Q8_0 or Q4_0 block


class BlockType(NamedTuple):
    """`number`: ggml's; `weights` stand together in `nbytes`."""

    number: int
    weights: int
    nbytes: int


TYPES = {
    "f32": BlockType(number=0, weights=1, nbytes=4),
    "q4_0": BlockType(number=2, weights=_BLOCK, nbytes=18),
    "q8_0": BlockType(number=8, weights=_BLOCK, nbytes=34),
    "q4_k": BlockType(number=12, weights=256, nbytes=144),
    "q6_k": BlockType(number=14, weights=256, nbytes=210),
    "bf16": BlockType(number=30, weights=1, nbytes=2),
}


@cache
def random_blocks(kind: str) -> np.ndarray:
    """Normal weights as blocks of a type: uint8 [blocks, bytes of a block], always the same."""
    values = np.random.default_rng(0).standard_normal(_COUNT, np.float32) * _SPREAD
    return _ENCODERS[kind](values).reshape(-1, TYPES[kind].nbytes)


def _f32(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint8)


def _bf16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _q8_0(values: np.ndarray) -> np.ndarray:
    """A float16 step, 32 signed bytes."""
    step, scaled = _by_largest(values, 127)
    codes = np.clip(np.rint(scaled), -127, 127).astype(np.int8).view(np.uint8)
    return np.concatenate([step, codes], 1)


def _q4_0(values: np.ndarray) -> np.ndarray:
    """A float16 step, 32 codes plus 8 in 16 bytes, the first 16 low."""
    step, scaled = _by_largest(values, -8)
    codes = np.clip(np.rint(scaled) + 8, 0, 15).astype(np.uint8)
    return np.concatenate([step, codes[:, :16] | codes[:, 16:] << 4], 1)


def _by_largest(values: np.ndarray, code: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps that make each block's largest weight `code`, as bytes, and the weights over them."""
    blocks = values.reshape(-1, _BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    step = (largest / code).astype(np.float16)
    return step.view(np.uint8), blocks / _divisor(step)


def _q4_k(values: np.ndarray) -> np.ndarray:
    """A float16 unit of the scales and one of the minima, both of 6 bits for each of 8 groups in 12
    bytes, then the codes: those of two groups share 32 bytes. A weight is scale x code - minimum.
    """
    groups = values.reshape(-1, 8, 32)
    lowest = -groups.min(2)
    scale_unit = ((groups.max(2) + lowest).max(1) / (15 * 63)).astype(np.float16)[:, None]
    least_unit = (lowest.max(1) / 63).astype(np.float16)[:, None]
    scales = np.rint((groups.max(2) + lowest) / (15 * _divisor(scale_unit)))
    minima = np.rint(lowest / _divisor(least_unit))
    step = scales * scale_unit.astype(np.float32)
    shifted = groups + (minima * least_unit.astype(np.float32))[..., None]
    codes = np.clip(np.rint(shifted / _divisor(step)[..., None]), 0, 15).astype(np.uint8)
    s = np.clip(scales, 0, 63).astype(np.uint8)
    m = np.clip(minima, 0, 63).astype(np.uint8)
    parts = [
        scale_unit.view(np.uint8),
        least_unit.view(np.uint8),
        s[:, :4] | s[:, 4:] >> 4 << 6,
        m[:, :4] | m[:, 4:] >> 4 << 6,
        s[:, 4:] & 15 | m[:, 4:] << 4,
        (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1, 128),
    ]
    return np.concatenate(parts, 1)


def _q6_k(values: np.ndarray) -> np.ndarray:
    """Low 4 bits of the 256 weights, their high 2 bits, 16 signed scales, a step."""
    groups = values.reshape(-1, 16, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2) / -32
    step = (np.abs(largest).max(1) / 127).astype(np.float16)
    unit = _divisor(step)[:, None]
    scales = np.rint(largest / unit)
    codes = np.clip(np.rint(groups / np.where(scales == 0, 1, scales * unit)) + 32, 0, 63)
    # Halves of 128 weights as four rows of 32: the low bits of rows 0 and 2, 1 and 3 share bytes,
    # the high of all four.
    rows = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = rows[:, :, :2] & 15 | rows[:, :, 2:] << 4
    high = rows >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    count = len(codes)
    parts = [
        low.reshape(count, 128),
        high.reshape(count, 64),
        scales[..., 0].astype(np.int8).view(np.uint8),
        step.view(np.uint8).reshape(count, 2),
    ]
    return np.concatenate(parts, 1)


def _divisor(step: np.ndarray) -> np.ndarray:
    return np.where(step == 0, 1, step).astype(np.float32)


_ENCODERS = {
    "f32": _f32,
    "bf16": _bf16,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_k": _q4_k,
    "q6_k": _q6_k,
}
