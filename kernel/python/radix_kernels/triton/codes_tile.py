"""Tiles of weights that are held as codes, in Triton's device code.

A tile is made of exact numbers in x's dtype: codes less their zero points, or 4-bit floats. Their
scale and minimum, one for each output and group of inputs, meet the float32 sums over a group:

    acc += (x @ tile.T) * scale + (sum of x) * minimum
"""

from __future__ import annotations

import triton
import triton.language as tl

INT8 = tl.constexpr(0)
INT4 = tl.constexpr(1)
MXFP4 = tl.constexpr(2)
KINDS = {"int8": 0, "int4": 1, "mxfp4": 2}


@triton.jit
def code_tile(
    codes,
    row,
    in_n,
    zero,
    start,
    dtype: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Inputs start .. start + BLOCK_K of the rows `row` (int64 [N], of which in_n are there), [N,
    BLOCK_K]; zero: int8 [N], what the codes of these inputs are counted from."""
    if KIND == INT8:
        k = tl.arange(0, BLOCK_K)
        inside = in_n[:, None] & (k < K - start)[None, :]
        at = codes + row[:, None] * K + start + k[None, :]
        whole = tl.load(at, mask=inside, other=0)
    else:
        ROW: tl.constexpr = (K + 1) // 2
        pair = tl.arange(0, BLOCK_K // 2)
        first = start // 2
        inside = in_n[:, None] & (pair < ROW - first)[None, :]
        both = tl.load(codes + row[:, None] * ROW + first + pair[None, :], mask=inside, other=0)
        low = (both & 15).to(tl.int8)
        high = (both >> 4).to(tl.int8)
        if KIND == MXFP4:
            low = _twice_the_float(low)
            high = _twice_the_float(high)
        else:
            low -= zero[:, None]
            high -= zero[:, None]
        whole = tl.reshape(tl.join(low, high), [row.shape[0], BLOCK_K])
    return whole.to(tl.float32).to(dtype)  # the interpreter has no way from integers to bfloat16


@triton.jit
def _twice_the_float(code):
    """Twice what a 4-bit float (sign, two bits of exponent, one of mantissa) stands for: int8."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    size = tl.where(exponent == 0, mantissa, (mantissa + 2) << tl.maximum(exponent - 1, 0))
    return tl.where(code > 7, -size, size).to(tl.int8)


@triton.jit
def code_zero(zeros, at, in_n, KIND: tl.constexpr, ZEROS: tl.constexpr, MINS: tl.constexpr):
    """What 4-bit codes are counted from, int8 [N]: their zero points, 8, or 0 beside minima. `at`:
    places of the group's numbers."""
    if ZEROS:
        return tl.load(zeros + at, mask=in_n, other=0).to(tl.int8)
    else:
        middle: tl.constexpr = 8 if (KIND == INT4) and (not MINS) else 0
        return tl.full(at.shape, middle, tl.int8)


@triton.jit
def code_scale(scales, at, in_n, KIND: tl.constexpr):
    """Factors of a group's sums, float32 [N]. Of 4-bit floats half the power of two, for
    `code_tile` has twice the floats."""
    if KIND == MXFP4:
        power = tl.load(scales + at, mask=in_n, other=0).to(tl.int32)
        # 2^(power - 128), the least two of which have no exponent.
        bits = tl.where(power < 2, (1 << 21) << tl.minimum(power, 1), (power - 1) << 23)
        return bits.to(tl.float32, bitcast=True)
    else:
        return tl.load(scales + at, mask=in_n, other=0).to(tl.float32)


@triton.jit
def added_codes(
    acc,
    x,
    total,
    codes,
    scales,
    zeros,
    mins,
    row,
    in_n,
    start,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MINS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc with what the inputs start .. of x [M, BLOCK_K] add; total: their sums, of use to
    minima."""
    at = row
    if GROUP > 0:
        at += start // GROUP * ROWS
    zero = code_zero(zeros, at, in_n, KIND, ZEROS, MINS)
    w = code_tile(codes, row, in_n, zero, start, x.dtype, K, KIND, BLOCK_K)
    part = tl.dot(x, tl.trans(w), input_precision="ieee")
    acc += part * code_scale(scales, at, in_n, KIND)[None, :]
    if MINS:
        acc += total[:, None] * tl.load(mins + at, mask=in_n, other=0).to(tl.float32)[None, :]
    return acc
