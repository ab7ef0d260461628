"""Prompts and chunks over FP8 keys and values, with FP8 queries too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import radix_kernels as rk
from tests.kernel.attention_cases import Case, make_case, oracle
from tests.kernel.helpers import (
    ATTENTION,
    ATTENTION_FP8,
    LSE_FP8,
    assert_close,
    assert_same_bits,
    guarded,
)

pytestmark = pytest.mark.cover("values")

HALVES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn


def fp8_case(rng: torch.Generator) -> tuple[Case, dict]:
    """A case whose caches are FP8, and the scales that go with it; keys and values are what they
    stand for."""
    case = make_case([(3, 40), (20, 25)], rng, heads=(4, 2), dtype=torch.bfloat16)
    scales = {"k_scale": torch.tensor([0.5, 0.25]), "v_scale": torch.tensor([2.0, 1.0])}
    case.k_cache, case.v_cache = (x.to(FP8) for x in (case.k_cache, case.v_cache))
    for kept, scale in zip((case.keys, case.values), scales.values(), strict=True):
        kept[:] = [x.to(FP8).double() * scale[:, None] for x in kept]
    return case, scales


def all_fp8(
    rows: list[tuple[int, int]], rng: torch.Generator, per_head: bool, **sizes
) -> tuple[Case, Case, dict]:
    """A case with FP8 queries too; the case of what it stands for, in float64; the scales."""
    case = make_case(rows, rng, dtype=torch.bfloat16, **sizes)
    heads = case.q.shape[1]
    kv_heads = case.k_cache.shape[2]
    count = kv_heads if per_head else 1
    scales = {
        name: 0.25 + torch.rand(count, generator=rng) for name in ("q_scale", "k_scale", "v_scale")
    }
    wide = {name: x.double().expand(kv_heads)[:, None] for name, x in scales.items()}
    case.q = case.q.to(FP8)
    case.k_cache = case.k_cache.to(FP8)
    case.v_cache = case.v_cache.to(FP8)
    case.keys = [x.to(FP8) for x in case.keys]
    case.values = [x.to(FP8) for x in case.values]
    exact = replace(
        case,
        q=case.q.double() * wide["q_scale"].repeat_interleave(heads // kv_heads, 0),
        keys=[x.double() * wide["k_scale"] for x in case.keys],
        values=[x.double() * wide["v_scale"] for x in case.values],
    )
    return case, exact, scales


FP8_CASES = {
    "plain": ((4, 2), (128, 128), 16, {}),
    "one token a page": ((8, 2), (128, 128), 1, {}),
    "pages of 64": ((4, 4), (128, 128), 64, {"causal": False}),
    "pages of 48, small heads": ((6, 2), (64, 64), 48, {}),
    "two sizes": ((4, 1), (80, 48), 128, {"window_size": (100, 0)}),
    "all": (
        (4, 2),
        (128, 128),
        256,
        {"sinks": True, "softcap": 20.0, "window_size": (130, 0), "softmax_scale": 0.1},
    ),
}


@pytest.mark.parametrize("what", FP8_CASES.values(), ids=FP8_CASES)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("out_dtype", HALVES, ids=str)
def test_fp8(what, per_head, out_dtype, rng):
    heads, (dim, v_dim), page_size, options = what
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.randn(heads[0], generator=rng)
    rows = [(129, 129), (1, 300), (0, 5), (70, 357), (330, 400), (2, 0), (9, 4), (1, 1)]
    case, exact, scales = all_fp8(
        rows, rng, per_head, heads=heads, dim=dim, v_dim=v_dim, page_size=page_size
    )
    expected, expected_lse = oracle(exact, **options)
    out = guarded(tuple(expected.shape), out_dtype)
    _, lse = rk.flash_attn_with_kvcache(
        *case.args, **options, **scales, return_softmax_lse=True, max_seqlen_q=330, out=out.view
    )
    out.check()
    assert_close("flash_attn_with_kvcache FP8", out.view, expected, ATTENTION_FP8)
    assert_close("flash_attn_with_kvcache FP8 lse", lse, expected_lse, LSE_FP8)
    lens = torch.tensor([0, *(key.shape[0] for key in case.keys)])
    got, lse = rk.flash_attn_varlen(
        case.q,
        torch.cat(case.keys),
        torch.cat(case.values),
        case.cu_seqlens_q,
        lens.cumsum(0).to(torch.int32),
        **options,
        **scales,
        return_softmax_lse=True,
        max_seqlen_q=330,
    )
    assert got.dtype == torch.bfloat16
    assert_close("flash_attn_varlen FP8", got, expected, ATTENTION_FP8)
    assert_close("flash_attn_varlen FP8 lse", lse, expected_lse, LSE_FP8)


def test_bits_of_fp8_repeat_and_do_not_depend_on_the_batch(rng):
    if rk.capabilities()["ops"]["flash_attn_with_kvcache"]["bfloat16"]["impl"][:5] != "cuda:":
        pytest.skip("only Hopper's kernels have FP8")
    rows = [(200, 700), (90, 90), (140, 141)]
    case, _, scales = all_fp8(rows, rng, True, heads=(8, 2), dim=128)
    whole = rk.flash_attn_with_kvcache(*case.args, **scales, max_seqlen_q=200)
    assert_same_bits(rk.flash_attn_with_kvcache(*case.args, **scales, max_seqlen_q=200), whole)
    for row, (n, _) in enumerate(rows):
        begin = int(case.cu_seqlens_q[row])
        alone = rk.flash_attn_with_kvcache(
            case.q[begin : begin + n],
            case.k_cache,
            case.v_cache,
            case.page_table[row : row + 1],
            case.kv_lens[row : row + 1],
            torch.tensor([0, n], dtype=torch.int32),
            **scales,
            max_seqlen_q=200,
        )
        assert_same_bits(alone, whole[begin : begin + n])


@pytest.mark.cpu_only
def test_what_no_kernel_serves_runs_the_reference_or_is_an_error(rng):
    case, scales = fp8_case(rng)
    before = rk.get_fallback()
    try:
        rk.set_fallback("reference")
        got = rk.flash_attn_with_kvcache(*case.args, **scales)
        rk.set_fallback("error")
        with pytest.raises(RuntimeError, match="no kernel .*set_fallback"):
            rk.flash_attn_with_kvcache(*case.args, **scales)
    finally:
        rk.set_fallback(before)
    assert_close("flash_attn_with_kvcache", got, oracle(case)[0], ATTENTION[torch.bfloat16])


@pytest.mark.parametrize(
    "change",
    [
        {"q_scale": None},
        {"q_scale": torch.ones(1)},
        {"q_scale": torch.ones(2, 1)},
        {"k_scale": None, "v_scale": None, "q_scale": None},
        {"out": torch.empty(23, 4, 32, dtype=torch.bfloat16)},
    ],
    ids=["no scale of q", "one scale of q", "shape of q_scale", "no scales", "out"],
)
def test_errors_of_fp8_queries(change, rng):
    case, _, scales = all_fp8([(3, 40), (20, 25)], rng, True)
    with pytest.raises(ValueError):
        rk.flash_attn_with_kvcache(*case.args, **{**scales, **change})
    case.q = case.q.to(torch.bfloat16)
    with pytest.raises(ValueError, match="q_scale"):
        rk.flash_attn_with_kvcache(*case.args, **scales)


def test_fp8_queries_need_fp8_keys_and_a_16_bit_out(rng):
    case, _, scales = all_fp8([(3, 40)], rng, False)
    with pytest.raises(TypeError):
        rk.flash_attn_with_kvcache(*case.args, **scales, out=torch.empty(3, 4, 64))
    with pytest.raises(TypeError):
        rk.flash_attn_with_kvcache(
            case.q,
            *(x.to(torch.bfloat16) for x in (case.k_cache, case.v_cache)),
            *case.args[3:],
            q_scale=scales["q_scale"],
        )


@pytest.mark.parametrize(
    "change",
    [
        {"k_scale": None},
        {"v_scale": None},
        {"k_scale": torch.ones(3)},
        {"v_scale": torch.ones(1, 2)},
        {"max_seqlen_q": -1},
    ],
    ids=str,
)
def test_errors_of_fp8(change, rng):
    case, scales = fp8_case(rng)
    with pytest.raises(ValueError):
        rk.flash_attn_with_kvcache(*case.args, **{**scales, **change})


def test_scales_are_for_fp8_alone(rng):
    case = make_case([(3, 40)], rng)
    with pytest.raises(ValueError, match="k_scale"):
        rk.flash_attn_with_kvcache(*case.args, k_scale=torch.ones(1), v_scale=torch.ones(1))
