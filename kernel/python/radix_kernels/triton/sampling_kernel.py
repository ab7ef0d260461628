"""The draw of `radix_kernels.sampling` in Triton: one program per row.

A filter is a border in the order (x descending, id ascending): ids at or before it stay. Its value
is found digit by digit of the ordered bits of x, 16 candidates a pass over the row, by the weight
(ids, or mass) at or above each; then its id among the ids of that value. Every pass adds in one
fixed order, so a row's id does not depend on its batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

DIGITS = tl.constexpr(16)  # candidates of a pass: four bits of a key
LAST_ID = tl.constexpr(0x7FFFFFFF)
LARGEST = tl.constexpr(3.4028234663852886e38)  # float32
LEAST = tl.constexpr(1.1754943508222875e-38)  # normal float32: a temperature below it is greedy


@triton.jit
def _load(row, start, vocab, temperature, BLOCK: tl.constexpr):
    """Ids of a block and their x; -inf past the row."""
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(row + ids, mask=ids < vocab, other=-float("inf"))
    return ids, tl.div_rn(logits, tl.full([BLOCK], 1.0, tl.float32) * temperature)


@triton.jit
def _key(x):
    """Unsigned words in the order of x; -0 and 0 are one number."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _stays(x, ids, border, last_id):
    key = _key(x)
    return (key > border) | ((key == border) & (ids <= last_id))


@triton.jit
def _weight(x, stays, largest, BY_MASS: tl.constexpr):
    if BY_MASS:
        return tl.where(stays & (x > -float("inf")), tl.exp(x - largest), 0.0)
    return tl.where(stays & (x > -float("inf")), 1.0, 0.0)


@triton.jit
def _total(
    row, vocab, temperature, largest, border, last_id, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        ids, x = _load(row, start, vocab, temperature, BLOCK)
        sums += _weight(x, _stays(x, ids, border, last_id), largest, BY_MASS)
    return tl.sum(sums)


@triton.jit
def _border(
    row,
    vocab,
    temperature,
    largest,
    limit,
    border,
    last_id,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The key at which the weight, from the largest key down, reaches the limit, and the weight
    above it."""
    found = tl.full([], 0, tl.uint32)
    above = tl.full([], 0.0, tl.float32)
    digits = tl.arange(0, DIGITS)
    shift = tl.full([], 32, tl.uint32)
    for _ in range(8):
        shift -= 4
        candidates = found + (digits.to(tl.uint32) << shift)
        sums = tl.zeros([DIGITS, BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            ids, x = _load(row, start, vocab, temperature, BLOCK)
            weight = _weight(x, _stays(x, ids, border, last_id), largest, BY_MASS)
            sums += tl.where(_key(x)[None, :] >= candidates[:, None], weight[None, :], 0.0)
        at_least = tl.sum(sums, 1)  # falls from candidate to candidate
        digit = tl.maximum(tl.sum((at_least >= limit).to(tl.int32)) - 1, 0)
        next_one = tl.sum(tl.where(digits == digit + 1, at_least, 0.0))
        above = tl.where(digit == DIGITS - 1, above, next_one)
        found += digit.to(tl.uint32) << shift
    return found, above


@triton.jit
def _cut(
    row,
    vocab,
    temperature,
    largest,
    limit,
    border,
    last_id,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last (key, id) that stays of those at or before (border, last_id) when ids stay while the
    weight before them is below the limit: a number of ids, or that part of their mass. The same
    border when all stay."""
    total = _total(row, vocab, temperature, largest, border, last_id, BY_MASS, BLOCK)
    if BY_MASS:
        limit = tl.maximum(limit * total, 1e-6)  # the largest weighs 1 and always stays
    if total > limit:
        found, above = _border(
            row, vocab, temperature, largest, limit, border, last_id, BY_MASS, BLOCK
        )
        # How many of the ids that have this value stay, and which is the last of them.
        value = tl.where(found >= 0x80000000, found ^ 0x80000000, found ^ 0xFFFFFFFF).to(
            tl.float32, bitcast=True
        )
        each = tl.exp(value - largest) if BY_MASS else 1.0
        left = tl.maximum(tl.ceil((limit - above) / each), 1.0).to(tl.int32)
        seen = 0
        end = -1
        for start in range(0, vocab, BLOCK):
            ids, x = _load(row, start, vocab, temperature, BLOCK)
            equal = ((_key(x) == found) & _stays(x, ids, border, last_id)).to(tl.int32)
            rank = seen + tl.cumsum(equal, 0)
            end = tl.maximum(end, tl.max(tl.where((equal == 1) & (rank <= left), ids, -1)))
            seen += tl.sum(equal)
        border = found
        last_id = end
    return border, last_id


@triton.jit
def _words(seed, position, stream, start, BLOCK: tl.constexpr):
    """The Philox words of BLOCK neighbouring ids; `start` is a multiple of four."""
    blocks = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = blocks * 0
    a, b, c, d = tl.philox(
        seed, blocks, zero + position.to(tl.uint32), zero + stream.to(tl.uint32), zero
    )
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _draw(
    row,
    vocab,
    temperature,
    largest,
    min_p,
    seed,
    position,
    stream,
    border,
    last_id,
    BLOCK: tl.constexpr,
):
    """The id with the best score of those that stay, the lowest of equals. Noise is a float64
    logarithm of a float64 logarithm, computed for the blocks in which a bound says that it may
    win."""
    best = tl.full([], -float("inf"), tl.float32)
    best_id = tl.full([], LAST_ID, tl.int32)
    least = tl.where(min_p > 0, tl.minimum(min_p, 1.0), 0.0)  # the largest always stays; NaN is off
    for start in range(0, vocab, BLOCK):
        ids, x = _load(row, start, vocab, temperature, BLOCK)
        stays = _stays(x, ids, border, last_id) & (x > -float("inf"))
        stays &= tl.exp(x - largest) >= least
        words = _words(seed, position, stream, start, BLOCK)
        # -log(E) <= -log(u), which a rough logarithm gives; the word 0 counts as 1 half.
        rough = 22.1807098 - tl.log(tl.maximum(words.to(tl.float32), 0.5))
        bound = tl.max(tl.where(stays, x + rough, -float("inf")))
        if bound + 1e-3 + 1e-5 * tl.abs(bound) >= best:
            u = tl.minimum(
                ((words.to(tl.float64) + 0.5) * 2.3283064365386963e-10).to(tl.float32), 0.99999994
            )
            noise = -tl.log(-tl.log(1.0 - u.to(tl.float64)))
            score = tl.where(stays, x + noise.to(tl.float32), -float("inf"))
            top = tl.max(score)
            if top > best:
                best = top
                best_id = tl.min(tl.where(score == top, ids, LAST_ID))
    return best_id


@triton.jit
def draw_rows(
    logits, stride, vocab, temperatures, top_ks, top_ps, min_ps, seeds, positions, stream, out,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program draws the id of one row."""
    b = tl.program_id(0)
    row = logits + b.to(tl.int64) * stride
    temperature = tl.load(temperatures + b)
    # Infinity would make NaN of the ids that may not be drawn.
    temperature = tl.where(temperature == float("inf"), LARGEST, temperature)
    # The largest, the lowest id that has it, and whether there is a NaN.
    largest = tl.full([], -float("inf"), tl.float32)
    first = tl.full([], -1, tl.int32)
    broken = 0
    for start in range(0, vocab, BLOCK):
        ids, x = _load(row, start, vocab, 1.0, BLOCK)
        broken += tl.sum((x != x).to(tl.int32))
        top = tl.max(tl.where(x != x, -float("inf"), x))
        if top > largest:
            largest = top
            first = tl.min(tl.where(x == top, ids, LAST_ID))
    infinite = float("inf")
    whole = (broken == 0) & (tl.abs(largest) < infinite)
    scaled = tl.div_rn(largest, tl.where(temperature >= LEAST, temperature, 1.0))
    if whole & (temperature >= LEAST) & (tl.abs(scaled) < infinite):
        top_k, top_p, min_p = tl.load(top_ks + b), tl.load(top_ps + b), tl.load(min_ps + b)
        top_k = tl.where(min_p > 1, 1, top_k)  # the first stays
        border = tl.full([], 0, tl.uint32)
        last_id = tl.full([], LAST_ID, tl.int32)
        if (top_k > 0) & (top_k < vocab):
            border, last_id = _cut(
                row, vocab, temperature, scaled, top_k.to(tl.float32), border, last_id, False, BLOCK
            )  # fmt: skip
        if top_p < 1:
            border, last_id = _cut(
                row, vocab, temperature, scaled, top_p, border, last_id, True, BLOCK
            )
        first = _draw(
            row, vocab, temperature, scaled, min_p,
            tl.load(seeds + b), tl.load(positions + b), stream, border, last_id, BLOCK,
        )  # fmt: skip
    tl.store(out + b, tl.where(whole, first, -1))
