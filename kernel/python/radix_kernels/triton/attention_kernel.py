"""Attention over a paged or a contiguous KV in Triton, the device code.

Bound by bytes in decode (each K and V element is read once for a group of query heads) and by math
in prefill. A program owns one KV head and BLOCK_M packed queries: the GROUP query heads that share
the KV head, times BLOCK_M // GROUP tokens of one sequence. It walks the keys in blocks of BLOCK_N
that begin at multiples of BLOCK_N, so that what it sums depends on positions alone.

    grid            (query blocks, KV heads, splits)
    query blocks    sequence b begins at block (cu[b] - cu[0]) // tokens_per_block + b: an upper
                    bound that needs no host copy of cu; a block past its sequence's end returns at
                    once. Tokens before cu[0] and from cu[B] on belong to no sequence and are
                    neither read nor written
    dies            of a chip of several, a KV head's query blocks are all on one (`dies.py`)
    splits          split s owns keys [s * SPLIT, (s + 1) * SPLIT); its partial result is already
                    normalised, and `combine` joins the splits in index order
    contiguous KV   PAGE_SIZE 0: `kv_lens` holds the sequences' first keys and the last one's end
    FP8             tensors come as their bytes and become the dtype of `out`, which holds every
                    e4m3 number: products are exact on chips without that format too. The scales of
                    q and k join the scores' factor, that of v the result's

Nothing here is specific to a vendor. Products of float32 inputs are IEEE, not TF32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dies import find_piece
from .float8 import widened


@triton.jit
def _find_row(cu_seqlens, origin, target, rows, TOKENS: tl.constexpr):
    """The last sequence whose first block is at or before block `target`."""
    left = 0
    right = rows
    while left < right:
        middle = (left + right) // 2
        first = (tl.load(cu_seqlens + middle) - origin) // TOKENS + middle
        if first <= target:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def _softcapped(x, softcap):
    """softcap * tanh(x / softcap), by the sigmoid that every backend has; near 0, where that
    cancels, by a series."""
    y = x / softcap
    square = y * y
    series = 1.0 + square * (
        -1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))
    )
    return tl.where(tl.abs(y) < 0.25, x * series, softcap * (2.0 * tl.sigmoid(2.0 * y) - 1.0))


@triton.jit
def _load(base, at, mask, BYTES: tl.constexpr, FNUZ: tl.constexpr, dtype: tl.constexpr):
    """Elements of a tensor, 0 where not in the mask; bytes of e4m3 as the numbers that they are."""
    found = tl.load(base + at, mask=mask, other=0)
    if BYTES:
        found = widened(found, FNUZ).to(dtype)
    return found


@triton.jit
def _factor(scale, kv_head, PER_HEAD: tl.constexpr):
    """What the FP8 numbers of a KV head stand for; 1 without a scale."""
    if scale is None:
        return 1.0
    else:
        return tl.load(scale + (kv_head if PER_HEAD else 0))


@triton.jit
def _masked(
    scores, key, position, in_keys, high, window_left, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """-inf where a query does not see a key.

    One comparison where it is enough: a causal limit also ends the keys, and packed rows past the
    last token are not stored, so what they see does not matter.
    """
    if CAUSAL and WINDOW:
        age = (position[:, None] - key[None, :]).to(tl.uint32)  # a later key wraps to the top
        seen = age <= window_left.to(tl.uint32)
    elif CAUSAL:
        seen = key[None, :] <= position[:, None]
    elif WINDOW:
        earliest = position - window_left
        width = tl.maximum(high - earliest, 0).to(tl.uint32)
        seen = (key[None, :] - earliest[:, None]).to(tl.uint32) < width[:, None]
    else:
        seen = in_keys[None, :]
    return tl.where(seen, scores, float("-inf"))


# A compilation for each kind of `rows` and `window_left` (1, a multiple of 16) would hold up a
# server under load. A stride of 1 is a constant in here, without the methods of a tensor: what it
# multiplies is widened, not the stride.
@triton.jit(do_not_specialize=["rows", "window_left"])
def attend(
    q,
    k_cache,
    v_cache,
    page_table,
    kv_lens,
    cu_seqlens,
    sinks,
    q_scale,
    k_scale,
    v_scale,
    out,
    lse,
    part_out,
    part_lse,
    rows,
    scale,
    softcap,
    window_left,
    q_token,
    q_head,
    k_page,
    k_slot,
    k_head,
    v_page,
    v_slot,
    v_head,
    out_token,
    out_head,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    Q_BYTES: tl.constexpr,
    KV_BYTES: tl.constexpr,
    FNUZ: tl.constexpr,
    PER_HEAD: tl.constexpr,
    SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    DIES: tl.constexpr,
):
    """One (query block, KV head, split); SPLIT 0 means that one program sees every key."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    blocks = tl.num_programs(0)
    pieces = blocks * tl.num_programs(1)
    work = find_piece(tl.program_id(0) + blocks * tl.program_id(1), pieces, DIES)
    block = work % blocks
    kv_head = (work // blocks).to(tl.int64)
    split = tl.program_id(2)
    origin = tl.load(cu_seqlens)
    row = _find_row(cu_seqlens, origin, block, rows, TOKENS)
    begin = tl.load(cu_seqlens + row)
    q_len = tl.load(cu_seqlens + row + 1) - begin
    first = (block - ((begin - origin) // TOKENS + row)) * TOKENS
    if first >= q_len:
        return
    if PAGE_SIZE > 0:
        kv_len = tl.load(kv_lens + row)
        table = page_table + row.to(tl.int64) * table_row
    else:
        first_key = tl.load(kv_lens + row)
        kv_len = tl.load(kv_lens + row + 1) - first_key
    dtype: tl.constexpr = out.dtype.element_ty
    scale *= _factor(q_scale, kv_head, PER_HEAD) * _factor(k_scale, kv_head, PER_HEAD)

    packed = tl.arange(0, BLOCK_M)
    token = first + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    valid = (token < q_len) & (packed < TOKENS * GROUP)
    position = kv_len - q_len + token
    dim = tl.arange(0, DIM_PAD)
    in_dim = dim < DIM
    v_dim = tl.arange(0, V_PAD)
    in_v = v_dim < V_DIM
    at = (begin + token).to(tl.int64)
    q_at = at[:, None] * q_token + head[:, None] * q_head + dim[None, :]
    queries = _load(q, q_at, valid[:, None] & in_dim[None, :], Q_BYTES, FNUZ, dtype)

    low = 0
    high = kv_len
    if CAUSAL:
        high = tl.minimum(kv_len, kv_len - q_len + first + TOKENS)
    if WINDOW:
        low = tl.maximum(kv_len - q_len + first - window_left, 0) // BLOCK_N * BLOCK_N
    if SPLIT > 0:
        low = tl.maximum(low, split * SPLIT)
        high = tl.minimum(high, split * SPLIT + SPLIT)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        in_keys = key < high
        if PAGE_SIZE > 0:
            page = tl.load(table + key // PAGE_SIZE, mask=in_keys, other=0).to(tl.int64)
            slot = (key % PAGE_SIZE).to(tl.int64)
            k_at = page * k_page + slot * k_slot + kv_head * k_head
            v_at = page * v_page + slot * v_slot + kv_head * v_head
        else:
            slot = first_key.to(tl.int64) + key
            k_at = slot * k_slot + kv_head * k_head
            v_at = slot * v_slot + kv_head * v_head
        k_mask = in_keys[None, :] & in_dim[:, None]
        k = _load(k_cache, k_at[None, :] + dim[:, None], k_mask, KV_BYTES, FNUZ, dtype)
        scores = tl.dot(queries, k, input_precision="ieee") * scale
        if SOFTCAP:
            scores = _softcapped(scores, softcap)
        scores = _masked(scores, key, position, in_keys, high, window_left, CAUSAL, WINDOW)
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen nothing yet keeps -inf; exp(-inf - 0) is its weight.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        v_mask = in_keys[:, None] & in_v[None, :]
        v = _load(v_cache, v_at[:, None] + v_dim[None, :], v_mask, KV_BYTES, FNUZ, dtype)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top

    if SINKS and SPLIT == 0:
        sink = tl.load(sinks + head, mask=valid, other=0.0)
        new_top = tl.maximum(top, sink)
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.exp(sink - new_top)
        acc = acc * shrink[:, None]
        top = new_top
    some = total != 0  # NaN counts: it is there to be seen
    result = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    result *= _factor(v_scale, kv_head, PER_HEAD)
    log_sum = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    if SPLIT > 0:
        index = ((at - origin) * HEADS + head) * SPLITS + split
        tl.store(part_lse + index, log_sum, mask=valid)
        # Nothing seen: combine reads the -inf and not the values.
        keep = (valid & some)[:, None] & in_v[None, :]
        tl.store(part_out + index[:, None] * V_DIM + v_dim[None, :], result, mask=keep)
    else:
        tl.store(
            out + at[:, None] * out_token + head[:, None] * out_head + v_dim[None, :],
            result.to(out.dtype.element_ty),
            mask=valid[:, None] & in_v[None, :],
        )
        if WITH_LSE:
            tl.store(lse + at * HEADS + head, log_sum, mask=valid)


@triton.jit(do_not_specialize=["rows"])
def combine(
    part_out,
    part_lse,
    cu_seqlens,
    sinks,
    out,
    lse,
    rows,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Join the splits of one (token, head), in index order. Partial results are counted from the
    first sequence's first token."""
    origin = tl.load(cu_seqlens)
    part_token = tl.program_id(0).to(tl.int64)
    token = origin + part_token
    if token >= tl.load(cu_seqlens + rows):
        return
    head = tl.program_id(1).to(tl.int64)
    first = (part_token * HEADS + head) * SPLITS
    splits = tl.arange(0, SPLITS_PAD)
    sums = tl.load(part_lse + first + splits, mask=splits < SPLITS, other=float("-inf"))
    top = tl.max(sums, 0)
    if SINKS:
        sink = tl.load(sinks + head)
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(sums - base), 0)
    if SINKS:
        total += tl.exp(sink - base)
    dim = tl.arange(0, V_PAD)
    acc = tl.zeros([V_PAD], tl.float32)
    for split in range(SPLITS):
        part = tl.load(part_lse + first + split)
        values = tl.load(part_out + (first + split) * V_DIM + dim, mask=dim < V_DIM, other=0.0)
        # A split that saw nothing has written no values: whatever is there is not used.
        acc += tl.where(part == float("-inf"), 0.0, values) * tl.exp(part - base)
    some = total != 0  # NaN counts: it is there to be seen
    result = tl.where(some, acc / tl.where(some, total, 1.0), 0.0)
    tl.store(
        out + token * out_token + head * out_head + dim,
        result.to(out.dtype.element_ty),
        mask=dim < V_DIM,
    )
    if WITH_LSE:
        log_sum = tl.where(some, base + tl.log(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(lse + token * HEADS + head, log_sum)
