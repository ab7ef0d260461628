"""Grouped products in Triton, the device code: rows by the weight of their group.

A program owns BLOCK_M rows of one group by BLOCK_N columns; GROUP blocks of rows go over all
columns before the next, so that neighbours share the weights in the L2. A block without rows of a
group returns: nothing is read on the host. FP8: every 128 of K are summed alone and scaled by the
row's and the block's factor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .float8 import widened
from .tile_order import find_tile


# A compilation for each kind of a number that follows the batch would hold up a server under load.
@triton.jit(do_not_specialize=["rows"])
def grouped_product(
    x,
    w,
    x_scale,
    w_scale,
    groups,
    out,
    rows,
    x_row,
    x_group,
    out_row,
    out_group,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
    WIDEN: tl.constexpr,
    FNUZ: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """MASKED: groups [E] counts the rows, the second program id is the group. Else: groups [rows]
    names each row's.

    WIDEN: x and w are bytes of FP8 (FNUZ: e4m3fnuz) that the chip does not multiply, as in
    `fp8_gemm_kernel`.
    """
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    blocks = tl.cdiv(rows, BLOCK_M)
    block, column = find_tile(program, blocks, columns, GROUP)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    K_BLOCKS: tl.constexpr = (K + 127) // 128
    if MASKED:
        group = tl.program_id(1).to(tl.int64)
        count = tl.load(groups + group)
        if block * BLOCK_M >= count:
            return
        mine = row < tl.minimum(count, rows)
        x += group * x_group
        out += group * out_group
        if SCALED:
            x_scale += group * rows * K_BLOCKS
    else:
        group = tl.load(groups + block * BLOCK_M).to(tl.int64)
        if (group < 0) | (group >= EXPERTS):
            return
        mine = tl.load(groups + row, mask=row < rows, other=-1) == group

    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    source = tl.where(mine, row, 0).to(tl.int64)
    x_at = x + source[:, None] * x_row + k[None, :]
    w_at = w + group * N * K + n[:, None].to(tl.int64) * K + k[None, :]
    in_n = n < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SCALED:
        x_scale += source * K_BLOCKS
        w_scale += group * ((N + 127) // 128) * K_BLOCKS
    for start in range(0, K, BLOCK_K):
        if (K % BLOCK_K == 0) and (N % BLOCK_N == 0):
            a = tl.load(x_at + start, mask=mine[:, None], other=0.0)
            b = tl.load(w_at + start)
        else:
            in_k = k < K - start
            a = tl.load(x_at + start, mask=mine[:, None] & in_k[None, :], other=0.0)
            b = tl.load(w_at + start, mask=in_n[:, None] & in_k[None, :], other=0.0)
        if WIDEN:
            a = widened(a, FNUZ)
            b = widened(b, FNUZ)
        if SCALED:
            part = tl.dot(a, tl.trans(b))
            of_x = tl.load(x_scale + start // 128, mask=mine, other=0.0)
            of_w = tl.load(w_scale + n // 128 * K_BLOCKS + start // 128, mask=in_n, other=0.0)
            acc += part * of_x[:, None] * of_w[None, :]
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    tl.store(
        out + row[:, None].to(tl.int64) * out_row + n[None, :],
        acc.to(out.dtype.element_ty),
        mask=mine[:, None] & in_n[None, :],
    )
