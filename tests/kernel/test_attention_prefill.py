"""Prompts and chunks behind cached prefixes: sizes around the tiles of the GPU kernels."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from tests.kernel.attention_cases import Case, amplitude, make_case, oracle
from tests.kernel.helpers import (
    ATTENTION,
    assert_close,
    assert_same_bits,
    guarded,
)

pytestmark = pytest.mark.cover("values")

HALVES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
# (new tokens, keys): across the borders of 128 keys, a chunk behind a prefix, decode rows, rows
# with nothing to do.
ROWS = [(129, 129), (1, 300), (0, 5), (70, 357), (64, 64), (2, 0), (9, 4), (1, 1)]
OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "window": {"window_size": (100, 0)},
    "window of one": {"window_size": (0, 0)},
    "window without causal": {"window_size": (33, -1), "causal": False},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all": {"sinks": True, "softcap": 20.0, "window_size": (130, 0), "softmax_scale": 0.2},
}


def run(case: Case, options: dict, rng: torch.Generator) -> None:
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.randn(case.q.shape[1], generator=rng)
    dtype = case.q.dtype
    expected, expected_lse = oracle(case, **options)
    hint = int((case.cu_seqlens_q[1:] - case.cu_seqlens_q[:-1]).max())
    shape = (*case.q.shape[:2], case.v_cache.shape[-1])
    paged, ragged = (guarded(shape, dtype, gap=gap) for gap in (8, 0))
    _, lse = rk.flash_attn_with_kvcache(
        *case.args, **options, return_softmax_lse=True, max_seqlen_q=hint, out=paged.view
    )
    paged.check()
    assert_close(
        "flash_attn_with_kvcache",
        paged.view,
        expected,
        ATTENTION[dtype],
        amplitude(case, **options),
    )
    assert_close("flash_attn_with_kvcache lse", lse, expected_lse, (4e-6, 2e-5))
    lens = torch.tensor([0, *(key.shape[0] for key in case.keys)])
    _, lse = rk.flash_attn_varlen(
        case.q,
        torch.cat(case.keys),
        torch.cat(case.values),
        case.cu_seqlens_q,
        lens.cumsum(0).to(torch.int32),
        **options,
        return_softmax_lse=True,
        max_seqlen_q=hint,
        out=ragged.view,
    )
    ragged.check()
    assert_close(
        "flash_attn_varlen", ragged.view, expected, ATTENTION[dtype], amplitude(case, **options)
    )
    assert_close("flash_attn_varlen lse", lse, expected_lse, (4e-6, 2e-5))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_options(options, dtype, rng):
    run(make_case(ROWS, rng, dim=128, dtype=dtype), options, rng)


RAMPS = {
    "up": lambda at: 0.1 * at,
    "down": lambda at: -0.1 * at,
    "down by little": lambda at: -at // 128 * 2.0,
    "far below 0": lambda at: 0 * at - 150.0,
}


@pytest.mark.parametrize("ramp", RAMPS.values(), ids=RAMPS)
@pytest.mark.parametrize("dim", [128, 192])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_maxima_that_move(ramp, dim, dtype, rng):
    """Kernels go through keys from the last to the first and move a row's maximum only when it grew
    by much."""
    case = make_case([(129, 600), (90, 90)], rng, dim=dim, v_dim=128, dtype=dtype)
    case.q[..., 0] = dim**0.5  # so that the ramp is added to the scores
    for keys in case.keys:
        keys[..., 0] = ramp(torch.arange(keys.shape[0]))[:, None].to(dtype)
    expected, expected_lse = oracle(case)
    lens = torch.tensor([0, *(key.shape[0] for key in case.keys)])
    got, lse = rk.flash_attn_varlen(
        case.q,
        torch.cat(case.keys),
        torch.cat(case.values),
        case.cu_seqlens_q,
        lens.cumsum(0).to(torch.int32),
        return_softmax_lse=True,
        max_seqlen_q=129,
    )
    assert_close("flash_attn_varlen", got, expected, ATTENTION[dtype], amplitude(case))
    assert_close("flash_attn_varlen lse", lse, expected_lse, (4e-6, 2e-5))


@pytest.mark.parametrize("dim", [64, 128, 192])
def test_scores_of_zero_of_either_sign(dim, rng):
    """Every product with a key is -0: as bits the least of all integers, where kernels compare
    scores like them."""
    case = make_case([(129, 300), (7, 7)], rng, dim=dim, dtype=torch.bfloat16)
    case.q.zero_()
    for keys in case.keys:
        keys.copy_(-keys.abs())
    case.k_cache.copy_(-case.k_cache.abs())
    run(case, {}, rng)


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 48, 64, 128, 256])
@pytest.mark.parametrize("hnd", [False, True])
def test_page_sizes(page_size, hnd, rng):
    run(
        make_case(ROWS, rng, dim=128, page_size=page_size, hnd=hnd, gap=16, dtype=torch.bfloat16),
        {},
        rng,
    )


@pytest.mark.parametrize(
    "heads", [(1, 1), (8, 8), (8, 1), (6, 2), (5, 1), (14, 2), (24, 1)], ids=str
)
def test_head_groups(heads, rng):
    run(make_case([(40, 170), (1, 40)], rng, heads=heads, dim=64, dtype=torch.bfloat16), {}, rng)


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 144, 192, 256])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_head_dims(dim, page_size, dtype, rng):
    run(
        make_case([(33, 140), (1, 90), (130, 130)], rng, dim=dim, page_size=page_size, dtype=dtype),
        {},
        rng,
    )


@pytest.mark.parametrize("dim", [80, 256])
@pytest.mark.parametrize("window", [40, 200])
def test_windows_of_long_prompts(dim, window, rng):
    """Queries that see little of a block of keys follow others that see all of it."""
    case = make_case([(400, 900), (270, 270)], rng, heads=(2, 1), dim=dim, dtype=torch.bfloat16)
    run(case, {"window_size": (window, 0)}, rng)


@pytest.mark.parametrize(
    "dims", [(192, 128), (144, 96), (64, 128), (128, 48), (192, 64), (32, 256)], ids=str
)
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_values_of_another_size(dims, page_size, dtype, rng):
    rows = [(33, 140), (1, 90), (150, 270), (0, 3), (2, 0)]
    dim, v_dim = dims
    case = make_case(
        rows,
        rng,
        heads=(4, 4),
        dim=dim,
        v_dim=v_dim,
        page_size=page_size,
        dtype=dtype,
        hnd=page_size == 16,
    )
    run(case, {"sinks": True, "window_size": (120, 0)} if page_size == 128 else {}, rng)


def test_values_of_another_size_need_their_out(rng):
    case = make_case([(3, 20)], rng, dim=64, v_dim=32, dtype=torch.bfloat16)
    assert rk.flash_attn_with_kvcache(*case.args).shape == (3, 4, 32)
    with pytest.raises(ValueError, match="out has shape"):
        rk.flash_attn_with_kvcache(*case.args, out=torch.empty_like(case.q))


def test_a_nan_stays_in_its_row(rng):
    """Ragged rows lie next to each other, so a tile of one row's keys holds the next row's."""
    rows = [(130, 130), (60, 60), (1, 70)]
    case = make_case(rows, rng, dim=128, dtype=torch.bfloat16)
    k = torch.cat(case.keys)
    v = torch.cat(case.values)
    cu = torch.tensor([0, 130, 190, 260], dtype=torch.int32)
    clean = rk.flash_attn_varlen(case.q, k, v, case.cu_seqlens_q, cu, max_seqlen_q=130)
    k[130:190] = math.nan
    v[130:190] = math.nan
    case.q[130:190] = math.nan
    got = rk.flash_attn_varlen(case.q, k, v, case.cu_seqlens_q, cu, max_seqlen_q=130)
    assert_same_bits(got[:130], clean[:130])
    assert_same_bits(got[190:], clean[190:])


def test_bits_repeat_and_do_not_depend_on_the_batch(rng):
    if rk.capabilities()["ops"]["flash_attn_with_kvcache"]["bfloat16"]["impl"] == "reference":
        pytest.skip("the reference is torch's einsum, which promises nothing about bits")
    rows = [(200, 700), (1, 300), (90, 90), (1, 33), (140, 141)]
    case = make_case(rows, rng, heads=(8, 2), dim=128, dtype=torch.bfloat16)
    whole = rk.flash_attn_with_kvcache(*case.args, max_seqlen_q=200)
    assert_same_bits(rk.flash_attn_with_kvcache(*case.args, max_seqlen_q=200), whole)
    for row, (n, _) in enumerate(rows):
        begin = int(case.cu_seqlens_q[row])
        if n == 1:  # alone it would be decode's
            continue
        alone = rk.flash_attn_with_kvcache(
            case.q[begin : begin + n],
            case.k_cache,
            case.v_cache,
            case.page_table[row : row + 1],
            case.kv_lens[row : row + 1],
            torch.tensor([0, n], dtype=torch.int32),
        )
        assert_same_bits(alone, whole[begin : begin + n])
