"""e4m3 numbers from their bytes, for chips that have no type for them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(byte, FNUZ: tl.constexpr):
    """The numbers of e4m3 bytes (uint8) as float16, which holds every one; FNUZ: AMD's form, with
    an exponent one less.

    NaN, 0x7f and 0xff (FNUZ: 0x80 alone), comes of arithmetic: a comparison would keep a pair of
    scalar registers per element on AMD.
    """
    x = byte.to(tl.uint16)
    # Sign, exponent and mantissa where float16 has them; the exponents' biases differ by 8 (7).
    bits = ((x & 0x80) << 8) | ((x & 0x7F) << 7)
    if FNUZ:
        bits |= ((x ^ 0x80) - 1) & 0x7E00  # wraps for 0x80 alone
    else:
        bits |= (((x & 0x7F) + 1) & 0x80) << 7
    return (bits.to(tl.float16, bitcast=True) * (128.0 if FNUZ else 256.0)).to(tl.float16)
