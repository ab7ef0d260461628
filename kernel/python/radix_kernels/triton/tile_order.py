"""In which order the programs of a product take its tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(program, blocks, columns: tl.constexpr, HEIGHT: tl.constexpr):
    """(block of rows, column of tiles) of a program: HEIGHT of the `blocks` go over all columns
    before the next, so that neighbours share what they read in the L2."""
    first = program // (HEIGHT * columns) * HEIGHT
    height = tl.minimum(blocks - first, HEIGHT)
    inside = program % (HEIGHT * columns)
    return first + inside % height, inside // height
