"""MLA beside its decode: storing latent tokens, joining full keys, the prefill over those."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import ATTENTION, assert_close, assert_same_bits, guarded, spread
from tests.kernel.mla_cases import (
    FLOATS,
    LATENT,
    ROPE,
    SCALE,
    split,
)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("pages", "page_size"), [(3, 16), (40, 1), (5, 7)])
def test_store(pages, page_size, fp8, rng):
    """Every named slot gets its token's bits, and nothing else is touched."""
    tokens = spread((20, LATENT + ROPE), torch.bfloat16, rng)
    tokens[3, :128] = 0
    tokens[4, 128:256] = 1e-30
    latent = spread((20, LATENT), torch.bfloat16, rng, gap=8)
    rope = spread((20, ROPE), torch.bfloat16, rng, gap=8)
    latent.copy_(tokens[:, :LATENT])
    rope.copy_(tokens[:, LATENT:])
    width, dtype = (656, torch.uint8) if fp8 else (LATENT + ROPE, torch.bfloat16)
    cache = torch.randint(0, 120, (pages, page_size, width + 16), generator=rng).to(dtype)
    before = cache.clone()
    slots = torch.randperm(pages * page_size, generator=rng)[:20]
    slots[5] = -1
    rk.store_mla_kv(latent, rope, cache[..., :width], slots)
    expected = rk.reference.pack_mla_tokens(latent, rope) if fp8 else tokens
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            before[slot // page_size, slot % page_size, :width] = expected[token]
    assert torch.equal(cache, before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_store_of_other_sizes(dtype, rng):
    latent = spread((3, 24), dtype, rng)
    rope = spread((3, 10), dtype, rng)
    cache = torch.zeros(2, 2, 34, dtype=dtype)
    rk.store_mla_kv(latent, rope, cache, torch.tensor([3, 0, 1]))
    expected = torch.cat((latent, rope), -1)
    assert torch.equal(
        cache.flatten(0, 1),
        torch.stack((expected[1], expected[2], torch.zeros(34).to(dtype), expected[0])),
    )


def test_store_of_nothing():
    cache = torch.ones(2, 2, LATENT + ROPE, dtype=torch.bfloat16)
    empty = torch.empty(0, LATENT, dtype=torch.bfloat16), torch.empty(0, ROPE, dtype=torch.bfloat16)
    rk.store_mla_kv(*empty, cache, torch.empty(0, dtype=torch.int64))
    assert bool((cache == 1).all())


def test_the_fp8_form_is_near(rng):
    """A stored value is off by half a step of e4m3 at most."""
    tokens = spread((50, LATENT + ROPE), torch.bfloat16, rng)
    cache = torch.zeros(50, 1, 656, dtype=torch.uint8)
    rk.store_mla_kv(*split(tokens), cache, torch.arange(50))
    back = rk.reference.unpack_mla_cache(cache[:, 0], torch.float64)
    largest = (
        tokens[:, :LATENT]
        .double()
        .unflatten(-1, (4, 128))
        .abs()
        .amax(-1)
        .repeat_interleave(128, -1)
    )
    allowed = tokens[:, :LATENT].double().abs() / 16 + largest / 448 * 2**-10
    assert bool(((back - tokens.double())[:, :LATENT].abs() <= allowed * 1.0001).all())
    assert torch.equal(back[:, LATENT:], tokens[:, LATENT:].double())


@pytest.mark.parametrize(
    ("index", "change", "error"),
    [
        (0, lambda x: x.double(), TypeError),
        (1, lambda x: x[:2], ValueError),
        (1, lambda x: x.half(), TypeError),
        (2, lambda x: x[..., :500], ValueError),
        (2, lambda x: x.half(), TypeError),
        (2, lambda x: x[..., 0], ValueError),
        (3, lambda x: x.int(), TypeError),
        (3, lambda x: x[:1], ValueError),
    ],
)
def test_store_errors(index, change, error, rng):
    args = [
        spread((3, LATENT), torch.bfloat16, rng),
        spread((3, ROPE), torch.bfloat16, rng),
        torch.zeros(2, 2, LATENT + ROPE, dtype=torch.bfloat16),
        torch.tensor([0, 2, 1]),
    ]
    args[index] = change(args[index])
    with pytest.raises(error):
        rk.store_mla_kv(*args)


def test_store_refuses_slots_that_are_not_there(rng, request):
    if request.config.getoption("--device") != "cpu":
        pytest.skip("on a GPU such a token is left out")
    latent = spread((2, LATENT), torch.bfloat16, rng)
    rope = spread((2, ROPE), torch.bfloat16, rng)
    cache = torch.zeros(2, 2, LATENT + ROPE, dtype=torch.bfloat16)
    for slot in (-2, 4):
        with pytest.raises(ValueError, match=r"slot_mapping.* -?\d, expected -1"):
            rk.store_mla_kv(latent, rope, cache, torch.tensor([1, slot]))
    assert not cache.any()


@dataclass
class Gathered:
    """Rows of (first position, tokens) over a cache in which nothing else may be read."""

    args: list[torch.Tensor]
    starts: torch.Tensor
    expected: torch.Tensor


def gathered(
    rows: list[tuple[int, int]],
    rng: torch.Generator,
    *,
    page_size: int = 7,
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = False,
    width: int = LATENT + ROPE,
) -> Gathered:
    needed = [-(-(first + count) // page_size) for first, count in rows]
    pages = sum(needed) + 2
    cache = spread((pages, page_size, width), dtype, rng, gap=16)
    if fp8:
        cache = rk.reference.pack_mla_tokens(*split(cache))
    table = torch.full((len(rows), max([*needed, 0]) + 1), 2**30, dtype=torch.int32)
    free = torch.randperm(pages, generator=rng)
    expected = [torch.empty(0, width, dtype=dtype)]
    for row, (first, count) in enumerate(rows):
        mine = free[: needed[row]]
        free = free[needed[row] :]
        used = range(first // page_size, needed[row]) if count else range(0)
        table[row, used.start : used.stop] = mine[used.start : used.stop].to(torch.int32)
        at = torch.arange(first, first + count)
        tokens = cache[mine[at // page_size], at % page_size]
        if fp8:
            tokens = rk.reference.unpack_mla_cache(tokens, torch.float32).to(dtype)
        expected.append(tokens)
    ends = torch.tensor([0, *(count for _, count in rows)]).cumsum(0).to(torch.int32)
    starts = torch.tensor([first for first, _ in rows], dtype=torch.int32)
    return Gathered(args=[cache, table, ends], starts=starts, expected=torch.cat(expected))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("width", [LATENT + ROPE, 30, 8])
def test_gather(page_size, width, dtype, rng):
    rows = [(0, 90), (33, 1), (5, 0), (64, 130), (0, 64)]
    case = gathered(rows, rng, page_size=page_size, dtype=dtype, width=width)
    out = guarded(tuple(case.expected.shape), dtype, gap=16)
    assert rk.gather_mla_kv(*case.args, out.view, starts=case.starts) is out.view
    out.check()
    assert_same_bits(out.view, case.expected)
    whole = gathered([(0, n) for n in (3, 20)], rng, dtype=dtype, width=width)
    assert_same_bits(rk.gather_mla_kv(*whole.args, out.view[:23].clone()), whole.expected)


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_gather_of_the_fp8_form(page_size, rng):
    """Every code of e4m3, and scales of all sizes."""
    rows = [(0, 90), (33, 1), (64, 130)]
    case = gathered(rows, rng, page_size=page_size, fp8=True)
    cache, table, _ = case.args
    page = int(table[0, 0])
    codes = torch.arange(LATENT, dtype=torch.int64).to(torch.uint8)
    cache[page, 0, :LATENT] = codes
    token = rk.reference.unpack_mla_cache(cache[page, 0], torch.float32).to(torch.bfloat16)
    case.expected[0] = token
    out = guarded(tuple(case.expected.shape), torch.bfloat16, gap=16)
    rk.gather_mla_kv(*case.args, out.view, starts=case.starts)
    out.check()
    assert token.isnan().sum() == 4
    assert torch.equal(out.view[0].isnan(), token.isnan())
    assert_same_bits(out.view[0].nan_to_num(), token.nan_to_num())
    assert_same_bits(out.view[1:], case.expected[1:])


def test_gather_of_nothing(rng):
    case = gathered([(3, 0), (0, 0)], rng)
    out = torch.empty(0, LATENT + ROPE, dtype=torch.bfloat16)
    assert rk.gather_mla_kv(*case.args, out, starts=case.starts).shape == out.shape
    ends = torch.zeros(1, dtype=torch.int32)
    assert rk.gather_mla_kv(case.args[0], case.args[1][:0], ends, out) is out


@pytest.mark.parametrize(
    ("index", "change", "error"),
    [
        (0, lambda x: x.half(), TypeError),
        (0, lambda x: x[..., :500], ValueError),
        (0, lambda x: x[:, :0], ValueError),
        (1, lambda x: x.long(), TypeError),
        (1, lambda x: x[:1], ValueError),
        (2, lambda x: x.long(), TypeError),
        (2, lambda x: x[:2], ValueError),
        (3, lambda x: x.float(), TypeError),
        (3, lambda x: x[..., None], ValueError),
        (4, lambda x: x[:1], ValueError),
        (4, lambda x: x.long(), TypeError),
    ],
)
def test_gather_errors(index, change, error, rng):
    case = gathered([(0, 9), (2, 3)], rng)
    args = [*case.args, case.expected.clone(), case.starts]
    args[index] = change(args[index])
    with pytest.raises(error):
        rk.gather_mla_kv(*args[:4], starts=args[4])


@pytest.mark.parametrize(
    ("index", "values", "text"),
    [
        (1, [[0, 9, 9], [0, 2**30, 9]], r"page_table\[0, 1\] is 9, expected 0 to 4"),
        (1, [[0, 1, 9], [-1, 9, 9]], r"page_table\[1, 0\] is -1, expected 0 to 4"),
        (2, [1, 9, 12], r"cu_seqlens\[0\] is 1, expected 0"),
        (2, [0, 13, 12], r"cu_seqlens\[2\] is 12, less than the one before \(13\)"),
        (2, [0, 9, 11], r"cu_seqlens ends at 11, expected 12"),
        (4, [0, 19], r"row 1 has positions 19 to 22, expected 0 to 21"),
        (4, [-1, 0], r"row 0 has positions -1 to 8, expected 0 to 21"),
    ],
)
def test_gather_refuses_tokens_that_are_not_there(index, values, text, rng, request):
    if request.config.getoption("--device") != "cpu":
        pytest.skip("on a GPU such a token becomes zeros")
    case = gathered([(0, 9), (2, 3)], rng)
    args = [*case.args, torch.zeros_like(case.expected), case.starts]
    args[index] = torch.tensor(values, dtype=torch.int32)
    with pytest.raises(ValueError, match=text):
        rk.gather_mla_kv(*args[:4], starts=args[4])
    assert not args[3].any()


@pytest.mark.parametrize(("heads", "nope", "rope"), [(128, 128, 64), (3, 20, 6), (1, 8, 8)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_concat(heads, nope, rope, dtype, rng):
    k_nope = spread((5, heads, nope), dtype, rng, gap=8)
    k_rope = spread((5, 1, rope), dtype, rng, gap=8)
    k = guarded((5, heads, nope + rope), dtype, gap=8)
    rk.concat_mla_k(k.view, k_nope, k_rope)
    k.check()
    assert torch.equal(k.view, torch.cat((k_nope, k_rope.expand(-1, heads, -1)), -1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_prefill_of_the_full_form(dtype, rng):
    """A prompt before absorption, through `flash_attn_varlen`: keys of 128 + 64, values of 128."""
    heads = 3
    lengths = (5, 70, 1)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = int(starts[-1])
    q, k_nope, v = (spread((total, heads, n), dtype, rng) for n in (192, 128, 128))
    k_rope = spread((total, 1, ROPE), dtype, rng)
    k = guarded((total, heads, 192), dtype)
    rk.concat_mla_k(k.view, k_nope, k_rope)
    out = rk.flash_attn_varlen(
        q, k.view, v, starts, starts, softmax_scale=SCALE, max_seqlen_q=max(lengths)
    )
    k.check()
    full = torch.cat((k_nope, k_rope.expand(-1, heads, -1)), -1).double()
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        n = end - begin
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), full[begin:end]) * SCALE
        scores.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        expected = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v[begin:end].double())
        assert_close("flash_attn_varlen", out[begin:end], expected, ATTENTION[dtype])


@pytest.mark.parametrize(
    ("index", "change", "error"),
    [
        (0, lambda x: x[:, :1], ValueError),
        (0, lambda x: x.half(), TypeError),
        (1, lambda x: x.double(), TypeError),
        (2, lambda x: x.expand(-1, 2, -1), ValueError),
        (2, lambda x: x[:1], ValueError),
    ],
)
def test_concat_errors(index, change, error):
    args = [torch.zeros(3, 2, 24), torch.zeros(3, 2, 16), torch.zeros(3, 1, 8)]
    args = [x.bfloat16() for x in args]
    args[index] = change(args[index])
    with pytest.raises(error):
        rk.concat_mla_k(*args)
