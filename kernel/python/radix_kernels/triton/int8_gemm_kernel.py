"""INT8 products with scales in Triton, the device code.

A program owns BLOCK_M rows of a by BLOCK_N columns of b; GROUP blocks of rows go over all columns
before the next, so that neighbours share b in the L2. Sums are int32 and exact; what zero points of
a's rows add to them is taken off before they become float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_order import find_tile


# A compilation for each kind of a number that follows the batch would hold up a server under load.
@triton.jit(do_not_specialize=["rows", "sa_row", "sb_column", "azp_row"])
def int8_product(
    a,
    b,
    a_scale,
    b_scale,
    azp,
    b_sums,
    bias,
    out,
    rows,
    a_row,
    b_column,
    out_row,
    sa_row,
    sb_column,
    azp_row,
    N: tl.constexpr,
    K: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out = a @ b with their scales; b's columns are contiguous.

    Steps: sa_row and azp_row from row to row of a, sb_column from column to column of b, 0 where
    there is one for all.
    """
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    blocks = tl.cdiv(rows, BLOCK_M)
    block, tile = find_tile(program, blocks, columns, GROUP)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    mine, in_n = row < rows, n < N
    source = tl.where(mine, row, 0).to(tl.int64)
    column = tl.where(in_n, n, 0).to(tl.int64)
    a_at = a + source[:, None] * a_row + k[None, :]
    b_at = b + column[:, None] * b_column + k[None, :]

    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(a_at + start)
            w = tl.load(b_at + start)
        else:
            in_k = (k < K - start)[None, :]
            x = tl.load(a_at + start, mask=in_k, other=0)
            w = tl.load(b_at + start, mask=in_k, other=0)
        sums = tl.dot(x, tl.trans(w), sums, out_dtype=tl.int32)
    if SHIFTED:
        zero = tl.load(azp + source * azp_row)
        sums -= zero[:, None] * tl.load(b_sums + column)[None, :]
    scale = (
        tl.load(a_scale + source * sa_row)[:, None] * tl.load(b_scale + column * sb_column)[None, :]
    )
    result = sums.to(tl.float32) * scale
    if BIAS:
        result += tl.load(bias + column).to(tl.float32)[None, :]
    tl.store(
        out + source[:, None] * out_row + n[None, :],
        result.to(out.dtype.element_ty),
        mask=mine[:, None] & in_n[None, :],
    )
