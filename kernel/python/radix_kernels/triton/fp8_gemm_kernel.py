"""FP8 products with scales in Triton, the device code.

A program owns BLOCK_M rows of a by BLOCK_N columns of b; GROUP blocks of rows go over all columns
before the next, so that neighbours share b in the L2. Sums are float32. BLOCKS: a factor for 1 x
128 of a and 128 x 128 of b meets each sum over 128 of K; else one for a row (or all) and one for a
column (or all) meet the whole sum.

A chip multiplies one FP8 format or none: WIDEN makes the other's numbers float16, which holds every
one of them, so the products stay exact; the operands are then passed as their bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .float8 import widened
from .tile_order import find_tile


# A compilation for each kind of a number that follows the batch would hold up a server under load.
@triton.jit(
    do_not_specialize=[
        "rows",
        "a_batch",
        "b_batch",
        "out_batch",
        "sa_row",
        "sa_block",
        "sb_column",
        "sb_block",
    ]
)
def scaled_product(
    a,
    b,
    a_scale,
    b_scale,
    bias,
    out,
    rows,
    a_batch,
    b_batch,
    out_batch,
    a_row,
    b_column,
    out_row,
    sa_row,
    sa_block,
    sb_column,
    sb_block,
    N: tl.constexpr,
    K: tl.constexpr,
    BATCHED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    FNUZ: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[batch] = a[batch] @ b[batch] with their scales; b's columns are contiguous.

    Steps of the scales: sa_row from row to row of a, sb_column from column to column of b (BLOCKS:
    from 128 to 128), 0 where there is one for all; sa_block and sb_block along K.
    """
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    blocks = tl.cdiv(rows, BLOCK_M)
    if BATCHED:
        matrix = (program // (blocks * columns)).to(tl.int64)
        program = program % (blocks * columns)
        # Rows begin at multiples of 16 bytes in every matrix.
        a += tl.multiple_of(matrix * a_batch, 16)
        b += tl.multiple_of(matrix * b_batch, 16)
        out += tl.multiple_of(matrix * out_batch, 8)
    block, tile = find_tile(program, blocks, columns, GROUP)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    mine, in_n = row < rows, n < N
    source = tl.where(mine, row, 0).to(tl.int64)
    column = tl.where(in_n, n, 0).to(tl.int64)
    a_at = a + source[:, None] * a_row + k[None, :]
    b_at = b + column[:, None] * b_column + k[None, :]
    if BLOCKS:
        a_scale += source * sa_row
        b_scale += column // 128 * sb_column
        sa_step = tl.full([1], 0, tl.int64) + sa_block
        sb_step = tl.full([1], 0, tl.int64) + sb_block

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(a_at + start)
            w = tl.load(b_at + start)
        else:
            in_k = (k < K - start)[None, :]
            x = tl.load(a_at + start, mask=in_k, other=0.0)
            w = tl.load(b_at + start, mask=in_k, other=0.0)
        if WIDEN:
            x = widened(x, FNUZ)
            w = widened(w, FNUZ)
        part = tl.dot(x, tl.trans(w))
        if BLOCKS:
            of_a = tl.load(a_scale + start // 128 * sa_step)
            of_b = tl.load(b_scale + start // 128 * sb_step)
            acc += part * of_a[:, None] * of_b[None, :]
        else:
            acc += part
    if not BLOCKS:
        acc *= (
            tl.load(a_scale + source * sa_row)[:, None]
            * tl.load(b_scale + column * sb_column)[None, :]
        )
    if BIAS:
        acc += tl.load(bias + column).to(tl.float32)[None, :]
    tl.store(
        out + source[:, None] * out_row + n[None, :],
        acc.to(out.dtype.element_ty),
        mask=mine[:, None] & in_n[None, :],
    )
