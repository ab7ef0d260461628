"""Multi-head latent attention over a paged latent cache in Triton, the device code.

All query heads attend to one latent head, so a token of the cache is read once for BLOCK_M packed
query rows (row r of a sequence is token r // HEADS, head r % HEADS), as key and, its first LATENT
dimensions (256 or 512), as value. With few heads bound by bytes, with many by math.

    grid            query blocks * splits, a split's query blocks side by side (`dies.py`)
    query blocks    sequence b begins at block cu[b] * HEADS // BLOCK_M + b: an upper bound that
                    needs no host copy of cu; a block past its sequence's end returns at once
    splits          a row's keys are cut into pieces of one size, which follows from the row's own
                    length and the number of splits; a piece's result is already normalised, and
                    `join_splits` joins them in order

Strides come in pieces of Q_PIECE and KV_PIECE elements, the 16 bytes of a wide load where the
tensors allow it: so the compiler knows how the addresses are aligned, and none of these numbers
makes a compilation of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dies import find_piece
from .float8 import widened

ROPE = tl.constexpr(64)
GROUP = tl.constexpr(128)  # latent values that share a scale in the FP8 form
SPLIT_STEP = tl.constexpr(64)  # a split's size is a multiple of it, and it of BLOCK_N


@triton.jit
def _find_row(cu_seqlens, target, rows, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last sequence whose first block is at or before block `target`, and that block."""
    left = 0
    right = rows
    while left < right:
        middle = (left + right) // 2
        first = tl.load(cu_seqlens + middle).to(tl.int64) * HEADS // BLOCK_M + middle
        if first <= target:
            left = middle + 1
        else:
            right = middle
    row = left - 1
    return row, tl.load(cu_seqlens + row).to(tl.int64) * HEADS // BLOCK_M + row


@triton.jit
def _load_tokens(
    kv_cache,
    piece,
    inside,
    LATENT: tl.constexpr,
    KV_PIECE: tl.constexpr,
    FP8: tl.constexpr,
    dtype: tl.constexpr,
):
    """Latent [N, LATENT] and rotary [N, 64] values of the tokens at `piece`; 0 where not inside."""
    rope = tl.arange(0, ROPE)
    if FP8:
        group = tl.arange(0, LATENT // GROUP)
        at = (
            (piece * KV_PIECE)[:, None, None]
            + group[None, :, None] * GROUP
            + tl.arange(0, GROUP)[None, None, :]
        )
        values = widened(tl.load(kv_cache + at, mask=inside[:, None, None], other=0), False).to(
            tl.float32
        )
        scale_at = (piece * (KV_PIECE // 4))[:, None] + LATENT // 4 + group[None, :]
        scales = tl.load(
            kv_cache.to(tl.pointer_type(tl.float32)) + scale_at, mask=inside[:, None], other=0.0
        )
        latent = tl.reshape(values * scales[:, :, None], [piece.shape[0], LATENT]).to(dtype)
        rope_at = (piece * (KV_PIECE // 2))[:, None] + (LATENT + 16) // 2 + rope[None, :]
        rotary = tl.load(
            kv_cache.to(tl.pointer_type(tl.bfloat16)) + rope_at, mask=inside[:, None], other=0.0
        ).to(dtype)
    else:
        at = (piece * KV_PIECE)[:, None]
        latent = tl.load(
            kv_cache + at + tl.arange(0, LATENT)[None, :], mask=inside[:, None], other=0.0
        )
        rotary = tl.load(kv_cache + at + LATENT + rope[None, :], mask=inside[:, None], other=0.0)
    return latent, rotary


_NUMBERS = [
    "rows", "blocks", "splits", "q_token", "q_head", "rope_token", "rope_head", "cache_page",
    "cache_slot", "out_token", "out_head", "table_row",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def attend_latent(
    q_nope,
    q_rope,
    kv_cache,
    page_table,
    kv_lens,
    cu_seqlens,
    out,
    lse,
    part_out,
    part_lse,
    scale,
    rows,
    blocks,
    splits,
    q_token,
    q_head,
    rope_token,
    rope_head,
    cache_page,
    cache_slot,
    out_token,
    out_head,
    table_row,
    LATENT: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    Q_PIECE: tl.constexpr,
    KV_PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    FP8: tl.constexpr,
    CAUSAL: tl.constexpr,
    WITH_LSE: tl.constexpr,
    DIES: tl.constexpr,
):
    """One (query block, split); SPLIT_KEYS, the fewest keys of a split, is 0 where one program sees
    every key."""
    work = find_piece(tl.program_id(0), blocks * splits, DIES)
    block = work % blocks
    split = work // blocks
    if split >= splits:
        return
    row, first_block = _find_row(cu_seqlens, block, rows, HEADS, BLOCK_M)
    begin = tl.load(cu_seqlens + row)
    q_len = tl.load(cu_seqlens + row + 1) - begin
    first = (block - first_block).to(tl.int32) * BLOCK_M
    if first >= q_len * HEADS:
        return
    kv_len = tl.load(kv_lens + row)

    packed = first + tl.arange(0, BLOCK_M)
    token = packed // HEADS
    head = (packed % HEADS).to(tl.int64)
    valid = token < q_len
    position = kv_len - q_len + token
    at = (begin + token).to(tl.int64)
    dim = tl.arange(0, LATENT)
    nope = tl.load(
        q_nope + ((at * q_token + head * q_head) * Q_PIECE)[:, None] + dim[None, :],
        mask=valid[:, None],
        other=0.0,
    )
    rope = tl.load(
        q_rope
        + ((at * rope_token + head * rope_head) * Q_PIECE)[:, None]
        + tl.arange(0, ROPE)[None, :],
        mask=valid[:, None],
        other=0.0,
    )

    low = 0
    high = kv_len
    if CAUSAL:
        high = tl.minimum(kv_len, kv_len - q_len + (first + BLOCK_M - 1) // HEADS + 1)
    if SPLIT_KEYS > 0:
        even = tl.cdiv(tl.cdiv(kv_len, splits), SPLIT_STEP) * SPLIT_STEP
        keys = tl.maximum(even, SPLIT_KEYS)
        low = split * keys
        high = tl.minimum(high, low + keys)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, LATENT], tl.float32)
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < high
        page = tl.load(
            page_table + row.to(tl.int64) * table_row + key // PAGE_SIZE, mask=inside, other=0
        ).to(tl.int64)
        piece = page * cache_page + (key % PAGE_SIZE).to(tl.int64) * cache_slot
        latent, rotary = _load_tokens(kv_cache, piece, inside, LATENT, KV_PIECE, FP8, nope.dtype)
        scores = tl.dot(nope, tl.trans(latent))
        scores = tl.dot(rope, tl.trans(rotary), scores) * scale
        if CAUSAL:  # ends the keys too; packed rows past the last token are not stored
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        else:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen nothing yet keeps -inf; exp(-inf - 0) is its weight.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None])
        top = new_top

    some = total != 0  # NaN counts: it is there to be seen
    result = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    log_sum = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    if SPLIT_KEYS > 0:
        index = (at * HEADS + head) * splits + split
        tl.store(part_lse + index, log_sum, mask=valid)
        # Nothing seen: the join reads the -inf and not the values.
        tl.store(
            part_out + index[:, None] * LATENT + dim[None, :], result, mask=(valid & some)[:, None]
        )
    else:
        out_at = ((at * out_token + head * out_head) * Q_PIECE)[:, None] + dim[None, :]
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=valid[:, None])
        if WITH_LSE:
            tl.store(lse + at * HEADS + head, log_sum, mask=valid)


@triton.jit(do_not_specialize=["splits", "out_token", "out_head"])
def join_splits(
    part_out,
    part_lse,
    out,
    lse,
    splits,
    out_token,
    out_head,
    LATENT: tl.constexpr,
    HEADS: tl.constexpr,
    Q_PIECE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Join the splits of one (token, head), in order; a split that saw nothing changes no bit.

    Not `attention_kernel.combine`, which is compiled for one number of splits: here the batch may
    choose it.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    first = (token * HEADS + head) * splits
    each = tl.arange(0, MAX_SPLITS)
    top = tl.max(tl.load(part_lse + first + each, mask=each < splits, other=float("-inf")), 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    dim = tl.arange(0, LATENT)
    total = 0.0
    acc = tl.zeros([LATENT], tl.float32)
    for split in range(splits):
        part = tl.load(part_lse + first + split)
        if part != float("-inf"):
            weight = tl.exp(part - base)
            acc += tl.load(part_out + (first + split) * LATENT + dim) * weight
            total += weight
    some = total != 0  # NaN counts: it is there to be seen
    result = tl.where(some, acc / tl.where(some, total, 1.0), 0.0)
    out_at = (token * out_token + head * out_head) * Q_PIECE + dim
    tl.store(out + out_at, result.to(out.dtype.element_ty))
    if WITH_LSE:
        log_sum = tl.where(some, base + tl.log(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(lse + token * HEADS + head, log_sum)
