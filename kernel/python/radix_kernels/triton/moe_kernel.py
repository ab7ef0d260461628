"""Fused experts in Triton, the device code.

Bound by bytes while an expert has fewer than about 150 tokens (each weight is read once for all of
them), by math beyond. A pair is one (token, place in its top-k); pairs are the rows of every
product.

    up       act[pair] = gated(W1[e] gate half @ x[token], W1[e] up half @ x[token]), with biases
             silu(gate) * up, or another activation
    down     part[pair] = W2[e] @ act[pair] + bias
    combine  out[token] = sum over its pairs of topk_weight * part[pair], in order, in float32

A program of `product` owns BLOCK_M pairs of one expert and BLOCK_N columns of the result. Which
pairs:

    sorted   the blocks of moe_align_block_size. The grid is the most that the shapes may need;
             programs past num_tokens_post_padded return. Neighbouring programs share an expert's
             weights in the L2
    few      no sort: all pairs of the batch fit into BLOCK_M. A program of pair p runs if p is the
             first of its expert and takes every pair of that expert, so a weight is read once

SWAP exchanges the operands of the product (W @ x^T): weights then fill the matrix unit's long side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gating import GELU as _GELU
from ..gating import GELU_TANH as _GELU_TANH
from ..gating import SWIGLU_CLAMPED as _SWIGLU_CLAMPED
from .float8 import widened
from .tile_order import find_tile

GELU = tl.constexpr(_GELU)
GELU_TANH = tl.constexpr(_GELU_TANH)
SWIGLU_CLAMPED = tl.constexpr(_SWIGLU_CLAMPED)


@triton.jit
def local_expert(
    ids, expert_map, at, mask, NUM_EXPERTS: tl.constexpr, LOCALS: tl.constexpr, MAPPED: tl.constexpr
):
    """The expert of a pair as the weights, of LOCALS experts, number it; -1: it adds nothing
    here."""
    expert = tl.load(ids + at, mask=mask, other=-1)
    inside = (expert >= 0) & (expert < NUM_EXPERTS)
    if MAPPED:
        expert = tl.load(expert_map + expert, mask=inside, other=-1)
    return tl.where(inside & (expert < LOCALS), expert, -1)


@triton.jit
def _dot(x, w, acc, SWAP: tl.constexpr):
    """acc + x @ w.T for x [M, K], w [N, K]; with SWAP the transposed sum."""
    w = w.to(x.dtype)
    if SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:  # two returns in a row would both be compiled
        return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def _scaled_dot(x, w, acc, scale, SWAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The same with a factor for each column of the result, for FP8 blocks."""
    part = _dot(x, w, tl.zeros([N, M] if SWAP else [M, N], tl.float32), SWAP)
    return acc + part * (scale[:, None] if SWAP else scale[None, :])


@triton.jit
def row_bias(bias, n, in_n, SWAP: tl.constexpr):
    """The biases of rows n of w, along the side of a sum that has those rows."""
    value = tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)
    if SWAP:
        return value[:, None]
    else:  # as in _dot
        return value[None, :]


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The gated activation of `gating`; a comparison with a NaN is false, so that it stays one."""
    if ACTIVATION == SWIGLU_CLAMPED:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up)
        return gate * tl.sigmoid(gate * ALPHA) * (up + 1.0)
    elif ACTIVATION == GELU:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == GELU_TANH:  # x/2 (1 + tanh u) = x sigmoid(2 u)
        u = 0.7978845608028654 * gate * (1.0 + 0.044715 * gate * gate)
        return gate * tl.sigmoid(2.0 * u) * up
    else:
        return gate * tl.sigmoid(gate) * up


# A compilation for each kind of a number that follows the batch would hold up a server under load.
@triton.jit(do_not_specialize=["pairs"])
def product(
    x,
    w,
    scale,
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
    K: tl.constexpr,
    N: tl.constexpr,
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
    SCALE: tl.constexpr,
    WIDEN: tl.constexpr,
    FNUZ: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
):
    """N columns of results from rows of K. GATED: w has 2 N rows, the halves become ACTIVATION of
    first and second. BIASED: bias has a number for each row of w.

    TOPK: pairs per row of x (1: x has a row for each pair). SCALE: 0 none, 1 per expert, 2 per
    block of 128 x 128. WIDEN: w is bytes of FP8 (FNUZ: e4m3fnuz) that the chip does not know.
    """
    program = tl.program_id(0)
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if FEW:
        pair = program // columns
        column = program % columns
        expert = local_expert(ids, expert_map, pair, True, NUM_EXPERTS, LOCALS, MAPPED)
        if expert < 0:
            return
        row = tl.arange(0, BLOCK_M)
        mine = (
            local_expert(ids, expert_map, row, row < pairs, NUM_EXPERTS, LOCALS, MAPPED) == expert
        )
        if tl.min(tl.where(mine, row, BLOCK_M), 0) < pair:
            return
    else:
        blocks = tl.load(total) // BLOCK_M
        if program >= blocks * columns:
            return
        block, column = find_tile(program, blocks, columns, GROUP)
        expert = tl.load(block_experts + block)
        if expert >= LOCALS:
            return
        row = tl.load(sorted_ids + block * BLOCK_M + tl.arange(0, BLOCK_M))
        mine = row < pairs

    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    source = tl.where(mine, row, 0).to(tl.int64) // TOPK
    x_at = x + source[:, None] * x_row + k[None, :]
    ROWS: tl.constexpr = 2 * N if GATED else N
    w_at = w + expert.to(tl.int64) * ROWS * K + n[:, None].to(tl.int64) * K + k[None, :]
    in_n = n < N
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    K_BLOCKS: tl.constexpr = (K + 127) // 128
    if SCALE == 2:
        scale += expert.to(tl.int64) * ((ROWS + 127) // 128) * K_BLOCKS
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(x_at + start, mask=mine[:, None], other=0.0)
        else:
            in_k = k < K - start
            a = tl.load(x_at + start, mask=mine[:, None] & in_k[None, :], other=0.0)
        if (K % BLOCK_K == 0) and (N % BLOCK_N == 0):
            b = tl.load(w_at + start)
        else:
            mask = in_n[:, None] & (k < K - start)[None, :]
            b = tl.load(w_at + start, mask=mask, other=0.0)
        if WIDEN:
            b = widened(b, FNUZ)
        if SCALE == 2:
            factor = tl.load(scale + n // 128 * K_BLOCKS + start // 128, mask=in_n, other=0.0)
            acc = _scaled_dot(a, b, acc, factor, SWAP, BLOCK_M, BLOCK_N)
        else:
            acc = _dot(a, b, acc, SWAP)
        if GATED:
            if (K % BLOCK_K == 0) and (N % BLOCK_N == 0):
                c = tl.load(w_at + N * K + start)
            else:
                mask = in_n[:, None] & (k < K - start)[None, :]
                c = tl.load(w_at + N * K + start, mask=mask, other=0.0)
            if WIDEN:
                c = widened(c, FNUZ)
            if SCALE == 2:
                factor = tl.load(
                    scale + (n + N) // 128 * K_BLOCKS + start // 128, mask=in_n, other=0.0
                )
                up = _scaled_dot(a, c, up, factor, SWAP, BLOCK_M, BLOCK_N)
            else:
                up = _dot(a, c, up, SWAP)
    if SCALE == 1:
        factor = tl.load(scale + expert)
        acc *= factor
        up *= factor
    if BIASED:
        bias += expert.to(tl.int64) * ROWS
        acc += row_bias(bias, n, in_n, SWAP)
        if GATED:
            up += row_bias(bias + N, n, in_n, SWAP)
    if GATED:
        acc = gated(acc, up, ACTIVATION, ALPHA, LIMIT)
    if SWAP:
        acc = tl.trans(acc)
    tl.store(
        out + row[:, None].to(tl.int64) * out_row + n[None, :],
        acc.to(out.dtype.element_ty),
        mask=mine[:, None] & in_n[None, :],
    )


@triton.jit
def combine(
    part,
    weights,
    ids,
    expert_map,
    out,
    out_row,
    HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    LOCALS: tl.constexpr,
    TOPK: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token's weighted sum; the part of a pair that adds nothing was not written and is not
    read."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    acc = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOPK):
        pair = token * TOPK + place
        here = local_expert(ids, expert_map, pair, True, NUM_EXPERTS, LOCALS, MAPPED) >= 0
        value = tl.load(part + pair * HIDDEN + column, mask=inside & here, other=0.0)
        acc += tl.where(here, tl.load(weights + pair), 0.0) * value.to(tl.float32)
    tl.store(out + token * out_row + column, acc.to(out.dtype.element_ty), mask=inside)
