"""Experts over weights of codes in Triton, the device code: as `moe_kernel`, whose `combine` comes
behind both products, with the tiles of codes_tile.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes_tile import added_codes
from .moe_kernel import gated, local_expert, row_bias
from .tile_order import find_tile


@triton.jit
def _few(
    ids, expert_map, pair, pairs, NUM_EXPERTS: tl.constexpr, LOCALS: tl.constexpr,
    MAPPED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(expert, rows, which of them are its own) of a batch that is not sorted; -1 where another
    program has this pair's expert, or nobody here."""
    expert = local_expert(ids, expert_map, pair, True, NUM_EXPERTS, LOCALS, MAPPED)
    row = tl.arange(0, BLOCK_M)
    of_row = local_expert(ids, expert_map, row, row < pairs, NUM_EXPERTS, LOCALS, MAPPED)
    mine = of_row == expert
    is_first = tl.min(tl.where(mine, row, BLOCK_M), 0) >= pair
    return tl.where(is_first, expert, -1), row, mine


# A compilation for each kind of a number that follows the batch would hold up a server under load.
@triton.jit(do_not_specialize=["pairs"])
def codes_expert_product(
    x,
    codes,
    scales,
    zeros,
    mins,
    bias,
    ids,
    expert_map,
    sorted_ids,
    block_experts,
    total,
    out,
    pairs,
    x_row,
    out_row,
    stack_bytes,
    K: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_SIZE: tl.constexpr,
    ZEROS: tl.constexpr,
    MINS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    LOCALS: tl.constexpr,
    TOPK: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    FEW: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """N columns of results from rows of K, by the expert's codes. GATED: these have 2 N rows, the
    halves become ACTIVATION of first and second. stack_bytes: from an expert to the next;
    SCALE_SIZE: bytes of a scale or minimum. The rest: as `moe_kernel.product`."""
    program = tl.program_id(0)
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if FEW:
        column = program % columns
        expert, row, mine = _few(
            ids, expert_map, program // columns, pairs, NUM_EXPERTS, LOCALS, MAPPED, BLOCK_M
        )
        if expert < 0:
            return
    else:
        blocks = tl.load(total) // BLOCK_M
        if program >= blocks * columns:
            return
        block, column = find_tile(program, blocks, columns, GROUP_M)
        expert = tl.load(block_experts + block)
        if expert >= LOCALS:
            return
        row = tl.load(sorted_ids + block * BLOCK_M + tl.arange(0, BLOCK_M))
        mine = row < pairs

    ROWS: tl.constexpr = 2 * N if GATED else N
    offset = tl.multiple_of(expert.to(tl.int64) * stack_bytes, 256)
    codes += offset
    scales += offset // SCALE_SIZE
    if ZEROS:
        zeros += offset
    if MINS:
        mins += offset // SCALE_SIZE
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    output = n.to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    source = tl.where(mine, row, 0).to(tl.int64) // TOPK
    x_at = x + source[:, None] * x_row + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    for start in range(0, K, BLOCK_K):
        a = tl.load(x_at + start, mask=mine[:, None] & (k < K - start)[None, :], other=0.0)
        sums = tl.sum(a.to(tl.float32), 1)
        acc = added_codes(
            acc, a, sums, codes, scales, zeros, mins, output, in_n, start,
            ROWS, K, KIND, GROUP, ZEROS, MINS, BLOCK_K,
        )  # fmt: skip
        if GATED:
            up = added_codes(
                up, a, sums, codes, scales, zeros, mins, output + N, in_n, start,
                ROWS, K, KIND, GROUP, ZEROS, MINS, BLOCK_K,
            )  # fmt: skip
    if BIASED:
        bias += expert.to(tl.int64) * ROWS
        acc += row_bias(bias, n, in_n, False)
        if GATED:
            up += row_bias(bias + N, n, in_n, False)
    if GATED:
        acc = gated(acc, up, ACTIVATION, ALPHA, LIMIT)
    tl.store(
        out + row[:, None].to(tl.int64) * out_row + n[None, :],
        acc.to(out.dtype.element_ty),
        mask=mine[:, None] & in_n[None, :],
    )
