"""Products with weights of codes in Triton, the device code.

A program owns BLOCK_M rows of x by BLOCK_N results; GROUP_M blocks of rows go over all columns
before the next, so that neighbours share weights in the L2. GATE: a result is silu(gate) * up of
two outputs, rows j and j + N of the weight (1) or 2 j and 2 j + 1 (2). Sums are float32, scaled for
each group (codes_tile.py), and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes_tile import added_codes
from .tile_order import find_tile


# A compilation for each kind of a number that follows the batch would hold up a server under load.
@triton.jit(do_not_specialize=["rows"])
def codes_product(
    x,
    codes,
    scales,
    zeros,
    mins,
    bias,
    residual,
    out,
    rows,
    x_row,
    residual_row,
    out_row,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MINS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """out [rows, N] = the gated product + bias, or the product + bias + residual. GROUP: inputs
    that share a scale, a multiple of BLOCK_K; 0: all of a row."""
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = 2 * N if GATE else N
    program = tl.program_id(0)
    blocks = tl.cdiv(rows, BLOCK_M)
    block, column = find_tile(program, blocks, columns, GROUP_M)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = row < rows
    in_n = n < N
    source = tl.where(mine, row, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x + source[:, None] * x_row + k[None, :]
    output = (n * 2 if GATE == 2 else n).to(tl.int64)
    second = output + (1 if GATE == 2 else N)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    for start in range(0, K, BLOCK_K):
        inputs = mine[:, None] & (k < K - start)[None, :]
        a = tl.load(x_at + start, mask=inputs, other=0.0)
        total = tl.sum(a.to(tl.float32), 1)
        acc = added_codes(
            acc, a, total, codes, scales, zeros, mins, output, in_n, start,
            ROWS, K, KIND, GROUP, ZEROS, MINS, BLOCK_K,
        )  # fmt: skip
        if GATE:
            up = added_codes(
                up, a, total, codes, scales, zeros, mins, second, in_n, start,
                ROWS, K, KIND, GROUP, ZEROS, MINS, BLOCK_K,
            )  # fmt: skip
    if BIAS:
        acc += tl.load(bias + output, mask=in_n, other=0).to(tl.float32)[None, :]
        if GATE:
            up += tl.load(bias + second, mask=in_n, other=0).to(tl.float32)[None, :]
    if GATE:
        acc = acc * tl.sigmoid(acc) * up
    there = mine[:, None] & in_n[None, :]
    if RESIDUAL:
        at = residual + source[:, None] * residual_row + n[None, :]
        acc += tl.load(at, mask=there, other=0).to(tl.float32)
    tl.store(out + source[:, None] * out_row + n[None, :], acc.to(out.dtype.element_ty), mask=there)
