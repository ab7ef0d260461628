"""MLA decode: the definition against a formula of its own, the kernel against it, poison, bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import ATTENTION, assert_close, assert_same_bits, guarded, spread

HALVES = (torch.bfloat16, torch.float16)
LATENT, ROPE = 512, 64
SCALE = 192**-0.5


@dataclass
class Case:
    """Rows of (q_len, kv_len) over a paged cache that is NaN wherever nothing may read."""

    args: tuple[torch.Tensor, ...]
    tokens: list[torch.Tensor]  # of each row, [kv_len, 576], as the cache holds them


def to_fp8(tokens: torch.Tensor) -> torch.Tensor:
    """[.., 576] -> uint8 [.., 656]: 512 e4m3, 4 float32 scales of 128 each, 64 bfloat16."""
    groups = tokens[..., :LATENT].float().unflatten(-1, (4, 128))
    scales = groups.abs().amax(-1) / 448
    scales = torch.where(scales > 0, scales, 1.0)
    latent = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    rope = tokens[..., LATENT:].to(torch.bfloat16).contiguous()
    return torch.cat((latent.view(torch.uint8), scales.contiguous().view(torch.uint8), rope.view(torch.uint8)), -1)


def make_case(
    rows: list[tuple[int, int]],
    rng: torch.Generator,
    *,
    heads: int = 4,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = False,
    gap: int = 0,
) -> Case:
    needed = [-(-kv // page_size) for _, kv in rows]
    pages = sum(needed) + 3
    cache = torch.full((pages, page_size, LATENT + ROPE), math.nan, dtype=dtype)
    if fp8:
        cache = torch.full((pages, page_size, 656), 255, dtype=torch.uint8)
    table = torch.full((len(rows), max([*needed, 0]) + 2), 2**30, dtype=torch.int32)
    free, tokens = torch.randperm(pages, generator=rng), []
    for row, (_, kv) in enumerate(rows):
        mine, free = free[: needed[row]], free[needed[row] :]
        table[row, : needed[row]] = mine.to(torch.int32)
        values = spread((kv, LATENT + ROPE), dtype, rng)
        stored = to_fp8(values) if fp8 else values
        for token in range(kv):
            cache[mine[token // page_size], token % page_size] = stored[token]
        tokens.append(rk.reference.unpack_mla_cache(stored, torch.float64))
    count = sum(n for n, _ in rows)
    starts = torch.tensor([0, *(n for n, _ in rows)]).cumsum(0).to(torch.int32)
    lens = torch.tensor([kv for _, kv in rows], dtype=torch.int32)
    q = spread((count, heads, LATENT), dtype, rng, gap=gap), spread((count, heads, ROPE), dtype, rng, gap=gap)
    return Case((*q, cache, table, lens, starts), tokens)


def oracle(case: Case, causal: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Straight from the definition, a query at a time."""
    nope, rope, *_, starts = case.args
    q = torch.cat((nope, rope), -1).double()
    out, lse = torch.zeros(nope.shape, dtype=torch.float64), torch.full(nope.shape[:2], -math.inf, dtype=torch.float64)
    for row, tokens in enumerate(case.tokens):
        n = int(starts[row + 1] - starts[row])
        for i in range(n):
            seen = tokens[: max(0, len(tokens) - n + i + 1)] if causal else tokens
            if not len(seen):
                continue
            at = int(starts[row]) + i
            scores = q[at] @ seen.T * SCALE
            lse[at] = torch.logsumexp(scores, -1)
            out[at] = torch.softmax(scores, -1) @ seen[:, :LATENT]
    return out, lse


def run(case: Case, causal: bool = True) -> None:
    expected, expected_lse = oracle(case, causal)
    dtype = case.args[0].dtype
    starts = case.args[-1]
    out = guarded(tuple(case.args[0].shape), dtype, gap=8)
    got, lse = rk.mla_decode(
        *case.args, softmax_scale=SCALE, causal=causal, return_softmax_lse=True, out=out.view,
        max_seqlen_q=int((starts[1:] - starts[:-1]).max()),
    )  # fmt: skip
    assert got is out.view
    out.check()
    assert_close("mla_decode", got, expected, ATTENTION[dtype])
    assert_close("mla_decode lse", lse, expected_lse, (4e-6, 3e-5))
    exact, exact_lse = rk.reference.mla_decode(
        *(x.double() for x in case.args[:2]), *case.args[2:], softmax_scale=SCALE, causal=causal,
        return_softmax_lse=True,
    )  # fmt: skip
    assert_close("reference.mla_decode", exact, expected, (1e-12, 1e-10))
    assert_close("reference.mla_decode lse", exact_lse, expected_lse, (1e-12, 1e-10))


@pytest.mark.parametrize("heads", [1, 5, 16, 20, 128])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_heads(heads, dtype, rng):
    run(make_case([(1, 70), (1, 33), (0, 4), (1, 1)], rng, heads=heads, dtype=dtype))


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("fp8", [False, True])
def test_page_sizes(page_size, fp8, rng):
    run(make_case([(1, 130), (1, 64), (1, 65)], rng, page_size=page_size, fp8=fp8, gap=16))


@pytest.mark.parametrize("kv_len", [31, 32, 33, 511, 512, 513, 1600])
def test_around_the_tiles_and_chunks(kv_len, rng):
    run(make_case([(1, kv_len)], rng, heads=2))


@pytest.mark.parametrize("heads", [4, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_several_queries(heads, causal, rng):
    """Chunks behind a prefix, and queries that see nothing: more of them than keys, and no keys at all."""
    run(make_case([(3, 90), (2, 2), (4, 2), (2, 0), (1, 600)], rng, heads=heads), causal)


def test_nothing_to_do(rng):
    case = make_case([], rng)
    assert rk.mla_decode(*case.args, softmax_scale=SCALE).shape == (0, 4, LATENT)


def test_bits_do_not_depend_on_run_or_neighbours(rng):
    if rk.capabilities()["ops"]["mla_decode"]["bfloat16"]["impl"] == "reference":
        pytest.skip("the reference is torch's einsum, which promises nothing about bits")
    case = make_case([(1, 1500), (1, 77), (1, 1024)], rng, heads=16)
    whole = rk.mla_decode(*case.args, softmax_scale=SCALE)
    for _ in range(5):
        assert_same_bits(rk.mla_decode(*case.args, softmax_scale=SCALE), whole)
    nope, rope, cache, table, lens, _ = case.args
    for row in range(3):
        one = slice(row, row + 1)
        start = torch.tensor([0, 1], dtype=torch.int32)
        alone = rk.mla_decode(nope[one], rope[one], cache, table[one], lens[one], start, softmax_scale=SCALE)
        assert_same_bits(alone, whole[one])


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
