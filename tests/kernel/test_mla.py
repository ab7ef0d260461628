"""MLA decode: the definition against a formula of its own, the kernel against it, poison, bits."""

from __future__ import annotations

import math
import os

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import ATTENTION, assert_close, assert_same_bits
from tests.kernel.mla_cases import (
    FLOATS,
    HALVES,
    LATENT,
    ROPE,
    SCALE,
    Case,
    check,
    make_case,
    oracle,
    rounded,
    rounds,
    split,
)


@pytest.mark.parametrize("heads", [1, 5, 16, 20, 64, 128])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_heads(heads, dtype, batch_invariant, rng):
    rows = [(1, 70), (1, 33), (0, 4), (1, 1)]
    check(make_case(rows, rng, heads=heads, dtype=dtype), batch_invariant=batch_invariant)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("latent", "rope"), [(256, 64), (16, 16), (112, 48), (512, 64)])
def test_sizes(latent, rope, dtype, rng, request):
    """A decode row over several splits, one token, chunks; on a GPU 512 and 256 in 16 bits alone
    have kernels."""
    if request.config.getoption("--device") != "cpu" and (latent < 256 or dtype == torch.float32):
        pytest.skip("no kernel on a GPU")
    rows = [(1, 600), (1, 1), (7, 90), (0, 3)]
    check(make_case(rows, rng, heads=20, dtype=dtype, latent=latent, rope=rope, gap=16))


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 96])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_page_sizes(page_size, fp8, batch_invariant, rng):
    check(
        make_case([(1, 130), (1, 64), (1, 65)], rng, page_size=page_size, fp8=fp8, gap=16),
        True,
        batch_invariant,
    )


@pytest.mark.parametrize("page_size", [1, 7, 8, 16, 64, 96, 128])
@pytest.mark.parametrize("heads", [40, 80])
def test_page_sizes_with_many_heads(page_size, heads, rng):
    rows = [(1, 130), (1, 64), (1, 193), (1, 0)]
    check(make_case(rows, rng, heads=heads, page_size=page_size, gap=16))


@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize("heads", [16, 40, 128])
def test_fp8_with_many_heads(page_size, heads, rng, request):
    if heads > 16 and request.config.getoption("--device") == "cpu":
        pytest.skip("the reference has one way for any number of heads")
    rows = [(1, 130), (2, 64), (1, 1), (1, 1100), (1, 0)]
    check(make_case(rows, rng, heads=heads, page_size=page_size, fp8=True, gap=16))


@pytest.mark.parametrize("heads", [2, 40])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_fp8_with_float16_queries(heads, batch_invariant, rng):
    """Which Hopper's kernels refuse: another one serves them."""
    case = make_case([(1, 130), (2, 33)], rng, heads=heads, dtype=torch.float16, fp8=True)
    check(case, batch_invariant=batch_invariant)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_that_blocks_share(heads, fp8, rng, request):
    """Many runs of a row, in the middle and at its ends, of one tile and of more; queries of
    several blocks."""
    if request.config.getoption("--device") == "cpu":
        if fp8:
            pytest.skip("the reference has no blocks that share a row")
        if heads > 64 and not os.environ.get("RADIX_TEST_FULL"):
            pytest.skip("more heads are more of the same on a CPU: with RADIX_TEST_FULL=1")
    check(
        make_case(
            [(1, 2500), (3, 65), (1, 1), (1, 700), (2, 4000)],
            rng,
            heads=heads,
            page_size=64,
            fp8=fp8,
        )
    )


@pytest.mark.parametrize("kv_len", [31, 32, 33, 511, 512, 513, 1600])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_around_the_tiles_and_chunks(kv_len, batch_invariant, rng):
    check(make_case([(1, kv_len)], rng, heads=2), batch_invariant=batch_invariant)


@pytest.mark.parametrize("kv_len", [63, 64, 65, 127, 128, 129, 4097])
def test_around_the_tiles_with_many_heads(kv_len, rng):
    check(make_case([(1, kv_len), (1, 5)], rng, heads=66, page_size=64))


@pytest.mark.parametrize("page_size", [8, 24])
@pytest.mark.parametrize("heads", [2, 40, 80])
def test_long_rows_in_small_pages(page_size, heads, rng):
    """Pages are looked up some tiles ahead: several times a row."""
    check(make_case([(1, 1100), (2, 300)], rng, heads=heads, page_size=page_size))


@pytest.mark.parametrize(("heads", "batch"), [(2, 64), (2, 132), (40, 64), (40, 132), (66, 64)])
def test_rows_that_no_run_cuts(heads, batch, rng, request):
    """As many rows of one length as there are runs, nearly: each run has a whole row, so nothing is
    joined."""
    batch = 4 if request.config.getoption("--device") == "cpu" else batch
    check(make_case([(1, 270)] * batch, rng, heads=heads, page_size=64))


@pytest.mark.parametrize("heads", [16, 80])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rises", [True, False])
def test_maxima_that_move(heads, fp8, rises, rng):
    """With every tile, or with the first alone: sums so far are scaled down, or what comes adds
    next to nothing."""
    case = make_case([(1, 400), (2, 130)], rng, heads=heads)
    case.args[0][..., 0] = 8
    for row, tokens in enumerate(case.tokens):
        ramp = torch.arange(len(tokens)) / 2
        tokens[:, 0] = (ramp if rises else ramp.flip(0)).to(torch.bfloat16)
        for at, token in enumerate(tokens):
            case.args[2][case.args[3][row, at // 16], at % 16, 0] = token[0]
    if fp8:
        packed, *stored = (
            rk.reference.pack_mla_tokens(*split(x.to(torch.bfloat16)))
            for x in (case.args[2], *case.tokens)
        )
        unpacked = [rk.reference.unpack_mla_cache(x, torch.float64) for x in stored]
        case = Case((*case.args[:2], packed, *case.args[3:]), unpacked)
    check(case)


@pytest.mark.parametrize("heads", [16, 80])
@pytest.mark.parametrize("scale", [0.0, -0.05])
def test_a_scale_of_any_sign(heads, scale, rng):
    case = make_case([(1, 130), (1, 20)], rng, heads=heads)
    exact = [x.double() for x in case.args[:2]]
    expected = rk.reference.mla_decode(*exact, *case.args[2:], softmax_scale=scale)
    got = rk.mla_decode(*case.args, softmax_scale=scale)
    assert_close("mla_decode", got, expected, ATTENTION[torch.bfloat16])


@pytest.mark.parametrize("heads", [4, 16, 64])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_several_queries(heads, causal, batch_invariant, rng):
    """Chunks behind a prefix, and queries that see nothing: more of them than keys, and no keys at
    all."""
    check(
        make_case([(3, 90), (2, 2), (4, 2), (2, 0), (1, 600)], rng, heads=heads),
        causal,
        batch_invariant,
    )


def test_a_hint_that_is_too_low(rng):
    """More query rows than max_seqlen_q says: slower, not wrong."""
    case = make_case([(1, 70), (6, 90)], rng, heads=40)
    expected, _ = oracle(case)
    got = rk.mla_decode(*case.args, softmax_scale=SCALE, max_seqlen_q=1)
    assert_close("mla_decode", got, expected, ATTENTION[torch.bfloat16])


@pytest.mark.parametrize("heads", [16, 80])
@pytest.mark.parametrize("pages", [0, 3])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_rows_without_tokens_or_pages(heads, pages, batch_invariant, rng):
    """An output is due even where the page table has no columns and the cache no pages."""
    nope, rope, cache, table, lens, starts = make_case([(1, 0), (2, 0)], rng, heads=heads).args
    out, lse = rk.mla_decode(
        nope,
        rope,
        cache[:pages],
        table[:, :0],
        lens,
        starts,
        softmax_scale=SCALE,
        return_softmax_lse=True,
        batch_invariant=batch_invariant,
    )
    assert not out.any() and bool((lse == -math.inf).all())


@pytest.mark.parametrize("heads", [16, 80])
def test_a_single_page_of_any_stride(heads, rng):
    """A dimension of one element steps nowhere, so its stride says nothing."""
    case = make_case([(1, 40)], rng, heads=heads, page_size=64)
    nope, rope, cache, table, *rest = case.args
    page = int(table[0, 0])
    size = 64 * (LATENT + ROPE)
    apart = torch.empty(2 * size, dtype=cache.dtype).as_strided(
        (1, 64, LATENT + ROPE), (size + 3, LATENT + ROPE, 1)
    )
    apart.copy_(cache[page : page + 1])
    got = rk.mla_decode(nope, rope, apart, torch.zeros_like(table), *rest, softmax_scale=SCALE)
    assert_close("mla_decode", got, oracle(case)[0], ATTENTION[torch.bfloat16])


@pytest.mark.parametrize(("batch", "kv_len"), [(1, 64), (3, 64), (140, 130)])
@pytest.mark.parametrize(
    ("heads", "fp8"), [(128, False), (64, False), (16, False), (128, True), (64, True)]
)
def test_every_call_ends(batch, kv_len, heads, fp8, rng, request):
    """Whether or not all blocks have work, in whatever order their warps run."""
    calls = 1 if request.config.getoption("--device") == "cpu" else 50
    case = make_case(
        [(1, kv_len)] * batch, rng, heads=heads if calls > 1 else 2, page_size=64, fp8=fp8
    )
    case = rounded(case) if rounds(case) else case
    first = rk.mla_decode(*case.args, softmax_scale=SCALE)
    assert_close("mla_decode", first, oracle(case)[0], ATTENTION[torch.bfloat16])
    for _ in range(calls):
        assert_same_bits(rk.mla_decode(*case.args, softmax_scale=SCALE), first)


def test_nothing_to_do(rng):
    case = make_case([], rng)
    assert rk.mla_decode(*case.args, softmax_scale=SCALE).shape == (0, 4, LATENT)


@pytest.mark.parametrize("heads", [16, 80])
def test_bits_do_not_depend_on_the_neighbours(heads, rng):
    if rk.capabilities()["ops"]["mla_decode"]["bfloat16"]["impl"] == "reference":
        pytest.skip("the reference is torch's einsum, which promises nothing about bits")
    case = make_case([(1, 1500), (1, 77), (1, 1024)], rng, heads=heads)
    whole = rk.mla_decode(*case.args, softmax_scale=SCALE, batch_invariant=True)
    nope, rope, cache, table, lens, _ = case.args
    for row in range(3):
        one = slice(row, row + 1)
        start = torch.tensor([0, 1], dtype=torch.int32)
        args = nope[one], rope[one], cache, table[one], lens[one], start
        assert_same_bits(
            rk.mla_decode(*args, softmax_scale=SCALE, batch_invariant=True), whole[one]
        )


@pytest.mark.parametrize("heads", [16, 80])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_bits_do_not_depend_on_the_run(heads, batch_invariant, rng):
    if rk.capabilities()["ops"]["mla_decode"]["bfloat16"]["impl"] == "reference":
        pytest.skip("the reference is torch's einsum, which promises nothing about bits")
    case = make_case([(1, 1500), (1, 77), (1, 1024)], rng, heads=heads)
    first = rk.mla_decode(*case.args, softmax_scale=SCALE, batch_invariant=batch_invariant)
    for _ in range(5):
        assert_same_bits(
            rk.mla_decode(*case.args, softmax_scale=SCALE, batch_invariant=batch_invariant), first
        )


@pytest.mark.parametrize(
    ("index", "change", "error"),
    [
        (0, lambda x: x.float(), TypeError),
        (0, lambda x: x[..., :256], ValueError),
        (1, lambda x: x[:, :2], ValueError),
        (2, lambda x: x.to(torch.float16), TypeError),
        (2, lambda x: x[..., :512], ValueError),
        (3, lambda x: x.long(), TypeError),
        (4, lambda x: x[:1], ValueError),
        (5, lambda x: x[:1], ValueError),
    ],
)
def test_errors(index, change, error, rng):
    args = list(make_case([(1, 5), (1, 3)], rng).args)
    args[index] = change(args[index])
    with pytest.raises(error):
        rk.mla_decode(*args, softmax_scale=SCALE)


@pytest.mark.parametrize(
    ("scale", "error"),
    [(None, TypeError), ("0.1", TypeError), (math.nan, ValueError), (math.inf, ValueError)],
)
def test_the_scale_has_no_default(scale, error, rng):
    with pytest.raises(error, match=r"mla_decode: softmax_scale is .* expected a"):
        rk.mla_decode(*make_case([(1, 5)], rng).args, softmax_scale=scale)


@pytest.mark.parametrize(("hint", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_a_hint_that_is_none(hint, error, rng):
    with pytest.raises(error, match="mla_decode: max_seqlen_q is .* expected"):
        rk.mla_decode(*make_case([(1, 5)], rng).args, softmax_scale=SCALE, max_seqlen_q=hint)


@pytest.mark.parametrize(
    ("index", "values", "text"),
    [
        (4, [49, 3], r"kv_lens\[0\] is 49, expected 0 to 48"),
        (4, [5, -1], r"kv_lens\[1\] is -1, expected 0 to 48"),
        (5, [1, 1, 2], r"cu_seqlens_q\[0\] is 1, expected 0"),
        (5, [0, 3, 2], r"cu_seqlens_q\[2\] is 2, less than the one before \(3\)"),
        (5, [0, 1, 1], "cu_seqlens_q ends at 1, expected 2"),
        (3, [[0, 7, 7], [5, 7, 7]], r"page_table\[1, 0\] is 5, expected 0 to 4"),
        (3, [[-1, 7, 7], [0, 7, 7]], r"page_table\[0, 0\] is -1, expected 0 to 4"),
    ],
)
def test_rows_that_are_not_there_are_refused(index, values, text, rng, request):
    if request.config.getoption("--device") != "cpu":
        pytest.skip("on a GPU reading them would wait for it")
    args = list(make_case([(1, 5), (1, 3)], rng).args)
    args[index] = torch.tensor(values, dtype=torch.int32)
    with pytest.raises(ValueError, match=text):
        rk.mla_decode(*args, softmax_scale=SCALE)


def test_tokens_of_no_row_are_refused(rng):
    nope, rope, cache, table, lens, starts = make_case([(1, 5)], rng).args
    with pytest.raises(ValueError, match="page_table has no rows"):
        rk.mla_decode(nope, rope, cache, table[:0], lens[:0], starts[:1], softmax_scale=SCALE)
