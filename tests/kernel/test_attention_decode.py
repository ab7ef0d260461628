"""A few query tokens a row over a paged cache: sizes around the chunks of the GPU kernel, rows
beside each other."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import radix_kernels as rk
from tests.kernel.attention_cases import Case, amplitude, make_case, oracle
from tests.kernel.helpers import ATTENTION, assert_close, assert_same_bits, guarded

pytestmark = pytest.mark.cover("values")

HALVES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "window": {"window_size": (300, 0)},
    "window of one": {"window_size": (0, 0)},
    "window without causal": {"window_size": (33, -1), "causal": False},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all": {"sinks": True, "softcap": 20.0, "window_size": (270, 0), "softmax_scale": 0.2},
}


def attend(case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    longest = int((case.cu_seqlens_q[1:] - case.cu_seqlens_q[:-1]).max())
    return rk.flash_attn_with_kvcache(
        *case.args, return_softmax_lse=True, max_seqlen_q=longest, **options
    )


def run(case: Case, options: dict, rng: torch.Generator) -> None:
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.randn(case.q.shape[1], generator=rng)
    expected, expected_lse = oracle(case, **options)  # whose keys and values are scaled already
    out = guarded(tuple(case.q.shape), case.q.dtype, gap=8)
    _, lse = attend(case, **options, out=out.view)
    out.check()
    assert_close(
        "flash_attn_with_kvcache",
        out.view,
        expected,
        ATTENTION[case.q.dtype],
        amplitude(case, **options),
    )
    assert_close("flash_attn_with_kvcache lse", lse, expected_lse, (4e-6, 2e-5))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_options(options, queries, dtype, rng):
    rows = [(queries, 600), (1, 1), (0, 20), (queries, 257), (queries, 3)]
    run(make_case(rows, rng, heads=(8, 2), dim=128, dtype=dtype), options, rng)


@pytest.mark.parametrize("kv_len", [15, 16, 17, 127, 255, 256, 257, 511, 512, 513, 1025])
def test_around_the_chunks(kv_len, rng):
    run(make_case([(1, kv_len), (1, 3 * kv_len)], rng, heads=(4, 1), dtype=torch.bfloat16), {}, rng)


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("hnd", [False, True])
def test_page_sizes(page_size, hnd, rng):
    rows = [(1, 700), (1, 64), (1, 65)]
    run(
        make_case(rows, rng, page_size=page_size, hnd=hnd, gap=16, dtype=torch.bfloat16, dim=128),
        {},
        rng,
    )


@pytest.mark.parametrize("heads", [(1, 1), (12, 2), (5, 1), (40, 8), (64, 1), (7, 7)], ids=str)
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_packed_rows(heads, queries, rng):
    run(
        make_case([(queries, 300), (queries, queries)], rng, heads=heads, dtype=torch.bfloat16),
        {},
        rng,
    )


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 192, 240, 256])
@pytest.mark.parametrize("queries", [1, 9])
def test_head_dims(dim, queries, rng):
    run(
        make_case([(queries, 300), (1, 40)], rng, heads=(8, 2), dim=dim, dtype=torch.float16),
        {},
        rng,
    )


@pytest.mark.parametrize("sinks", [False, True])
def test_queries_that_see_nothing(sinks, rng):
    rows = [(2, 0), (5, 3), (1, 4), (0, 0)]
    run(make_case(rows, rng, dtype=torch.bfloat16), {"sinks": True} if sinks else {}, rng)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("queries", [1, 17])
def test_a_cache_without_pages(dtype, queries, rng):
    case = make_case([(queries, 0)], rng, dtype=dtype)
    empty = dataclasses.replace(case, k_cache=case.k_cache[:0], v_cache=case.v_cache[:0])
    out, lse = attend(empty)
    assert not out.any() and bool((lse == -math.inf).all())


def test_more_rows_than_one_launch(rng):
    rows = [(1, 1 + i % 40) for i in range(1300)]
    run(make_case(rows, rng, heads=(2, 1), dtype=torch.bfloat16), {}, rng)


def test_bits_do_not_depend_on_run_or_neighbours(rng):
    rows = [(1, 2000), (1, 77), (1, 1024), (1, 300)]
    case = make_case(rows, rng, heads=(8, 2), dim=128, dtype=torch.bfloat16)
    out, lse = attend(case, batch_invariant=True)
    if rk.capabilities()["ops"]["flash_attn_with_kvcache"]["bfloat16"]["impl"] == "reference":
        pytest.skip("the reference is torch's einsum, which promises nothing about bits")
    for _ in range(5):
        for again, first in zip(attend(case, batch_invariant=True), (out, lse), strict=True):
            assert_same_bits(again, first)
    for row in range(len(rows)):
        alone = Case(
            q=case.q[row : row + 1],
            k_cache=case.k_cache,
            v_cache=case.v_cache,
            page_table=case.page_table[row : row + 1],
            kv_lens=case.kv_lens[row : row + 1],
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        )
        for got, whole in zip(attend(alone, batch_invariant=True), (out, lse), strict=True):
            assert_same_bits(got, whole[row : row + 1])


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("window", [-1, 200])
def test_few_rows_of_all_lengths(rows, window, rng):
    """Lengths at which a GPU cuts the rows of a small batch into chunks of another size."""
    for length in (1, 127, 129, 640, 1279, 1320, 1321, 2640, 2641, 5300):
        lengths = [(1, length), (1, 512), (1, 1300)][:rows]
        case = make_case(lengths, rng, heads=(8, 4), dim=128, dtype=torch.bfloat16)
        run(case, {"window_size": (window, -1)}, rng)


@pytest.mark.parametrize("heads", [(264, 66), (528, 66)], ids=str)
def test_runs_of_many_chunks(heads, rng):
    """So many KV heads that a GPU has blocks for two runs: a cut row, and few and many packed rows
    after each other."""
    rows = [(1, 600), (2, 700), (1, 2000), (3, 2), (1, 5000)]
    case = make_case(rows, rng, heads=heads, dim=16, dtype=torch.bfloat16)
    run(case, {}, rng)
    if rk.capabilities()["ops"]["flash_attn_with_kvcache"]["bfloat16"]["impl"] == "reference":
        return
    out, _ = attend(case, batch_invariant=True)
    for row in (2, 4):  # one query token
        begin = int(case.cu_seqlens_q[row])
        alone = Case(
            q=case.q[begin : begin + 1],
            k_cache=case.k_cache,
            v_cache=case.v_cache,
            page_table=case.page_table[row : row + 1],
            kv_lens=case.kv_lens[row : row + 1],
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        )
        longest = int((case.cu_seqlens_q[1:] - case.cu_seqlens_q[:-1]).max())
        got = rk.flash_attn_with_kvcache(*alone.args, max_seqlen_q=longest, batch_invariant=True)
        assert_same_bits(got, out[begin : begin + 1])


def run_fp8(
    rows: list[tuple[int, int]], options: dict, rng: torch.Generator, per_head: bool, **sizes
) -> None:
    """e4m3 values times their scales; garbage (NaN) in the slots that nothing may use."""
    case = make_case(rows, rng, **sizes)
    count = case.k_cache.shape[2] if per_head else 1
    scales = [torch.rand(count, generator=rng) + 0.5 for _ in range(2)]
    for kept, scale in ((case.keys, scales[0]), (case.values, scales[1])):
        kept[:] = [x.to(FP8).double() * scale[:, None].double() for x in kept]
    case.k_cache = case.k_cache.to(FP8)
    case.v_cache = case.v_cache.to(FP8)
    run(case, {**options, "k_scale": scales[0], "v_scale": scales[1]}, rng)


# Both sizes of a tile of query rows, and each size of a head that kernels are for: all ten of
# Hopper's.
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("queries", [1, 4, 9])
@pytest.mark.parametrize("per_head", [False, True])
def test_fp8_cache(dtype, dim, queries, per_head, rng):
    rows = [(queries, 700), (queries, 5), (0, 3), (1, 40)]
    run_fp8(rows, {}, rng, per_head, heads=(8, 2), dim=dim, dtype=dtype)


@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [1, 9])
def test_fp8_page_sizes(page_size, hnd, dim, queries, rng):
    rows = [(1, 520), (queries, 64), (queries, 65)]
    run_fp8(
        rows,
        {},
        rng,
        True,
        heads=(4, 2),
        dim=dim,
        page_size=page_size,
        hnd=hnd,
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_fp8_options(options, queries, dtype, rng):
    rows = [(queries, 600), (1, 1), (0, 20), (queries, 257), (queries, 3)]
    run_fp8(rows, options, rng, True, heads=(8, 2), dim=128, page_size=7, dtype=dtype)


def test_fp8_takes_queries_of_any_size(rng):
    """bf16 queries far outside of float16's range."""
    case = make_case([(1, 50)], rng, heads=(2, 1), dtype=torch.bfloat16)
    case.k_cache, case.v_cache = (x.to(FP8) for x in (case.k_cache, case.v_cache))
    case.keys, case.values = (
        [x.to(FP8).double() for x in kept] for kept in (case.keys, case.values)
    )
    one = torch.ones(1)
    for power in (-60, 60):
        big = replace(case, q=case.q * 2.0**power)
        options = {"softmax_scale": 2.0**-power / math.sqrt(64)}
        expected, _ = oracle(big, **options)
        got, _ = attend(big, k_scale=one, v_scale=one, **options)
        assert_close("flash_attn_with_kvcache", got, expected, ATTENTION[torch.bfloat16])
