"""Attention over pages and over contiguous keys: options, sizes, bits, NaN, errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import radix_kernels as rk
from tests.kernel.attention_cases import (
    OPTIONS,
    Case,
    amplitude,
    make_case,
    oracle,
    quantized,
    random_rows,
)
from tests.kernel.helpers import (
    ATTENTION,
    FLOATS,
    assert_close,
    assert_same_bits,
    distant,
    guarded,
    spread,
)


def run(
    case: Case, op_options: dict, rng: torch.Generator, tolerance: tuple[float, float] | None = None
) -> None:
    """Check out, lse, the reference, and that out is written fully and nothing beside it."""
    options = dict(op_options)
    if options.get("sinks"):
        options["sinks"] = torch.randn(case.q.shape[1], generator=rng)
    dtype = case.q.dtype
    expected, expected_lse = oracle(case, **options)
    out = guarded(tuple(case.q.shape), dtype, gap=8)
    got, lse = rk.flash_attn_with_kvcache(
        *case.args, **options, return_softmax_lse=True, out=out.view
    )
    assert got is out.view and lse.dtype == torch.float32
    out.check()
    assert_close(
        "flash_attn_with_kvcache",
        got,
        expected,
        tolerance or ATTENTION[dtype],
        amplitude(case, **options),
    )
    assert_close("flash_attn_with_kvcache lse", lse, expected_lse, (4e-6, 2e-5))
    wide = replace(
        case,
        q=case.q.double(),
        k_cache=case.k_cache.double(),
        v_cache=case.v_cache.double(),
    )
    exact, exact_lse = rk.reference.flash_attn_with_kvcache(
        *wide.args, **options, return_softmax_lse=True
    )
    assert_close("reference.flash_attn_with_kvcache", exact, expected, (1e-12, 1e-10))
    assert_close("reference.flash_attn_with_kvcache lse", exact_lse, expected_lse, (1e-12, 1e-10))


# INT8 is the CPU's.
INT8 = pytest.mark.parametrize("int8", [False, pytest.param(True, marks=pytest.mark.cpu_only)])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_options(options, dtype, rng):
    rows = [(1, 90), (3, 3), (5, 70), (1, 1), (0, 20), (40, 45)]
    run(make_case(rows, rng, dtype=dtype), options, rng)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("hnd", [False, True])
def test_page_sizes(page_size, hnd, rng):
    case = make_case(random_rows(5, rng), rng, page_size=page_size, hnd=hnd, gap=16)
    run(case, {}, rng)


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 1), (6, 2), (5, 1), (14, 2)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS[::2], ids=str)
def test_head_groups(heads, dtype, rng):
    run(make_case([(1, 40), (9, 30)], rng, heads=heads, dtype=dtype), {}, rng)


@pytest.mark.parametrize("dim", [16, 48, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_head_dims(dim, dtype, rng):
    run(make_case([(1, 33), (17, 20)], rng, dim=dim, dtype=dtype), {}, rng)


@pytest.mark.parametrize("kv_len", [511, 512, 513, 1024, 1300])
@pytest.mark.parametrize("options", [{}, {"window_size": (600, 0), "sinks": True}], ids=str)
def test_around_the_split_borders(kv_len, options, rng):
    case = make_case([(1, kv_len), (2, kv_len)], rng, heads=(2, 1), dim=32)
    run(case, options, rng)


LONG = {
    "plain": {},
    "window": {"window_size": (100, 0)},
    "window without causal": {"window_size": (300, -1), "causal": False},
    "not causal": {"causal": False},
    "all": {"sinks": True, "softcap": 20.0, "window_size": (290, 0), "softmax_scale": 0.2},
}


@pytest.mark.parametrize("options", LONG.values(), ids=LONG)
@pytest.mark.parametrize("heads", [(2, 1), (3, 1), (40, 1)], ids=str)
def test_prompts_of_several_blocks(options, heads, rng):
    """Prompts and chunks whose queries and keys fill more than one block of any kernel."""
    rows = [(300, 300), (70, 560), (33, 257)] if heads[0] < 10 else [(20, 300)]
    run(make_case(rows, rng, heads=heads, dim=48, dtype=torch.bfloat16), options, rng)


@pytest.mark.parametrize("heads", [(40, 1), (72, 2), (16, 8)], ids=str)
def test_decode_with_many_heads(heads, rng):
    run(make_case([(1, 700), (1, 40)], rng, heads=heads, dim=32, dtype=torch.bfloat16), {}, rng)


@INT8
def test_threads_do_not_change_the_bits(int8, rng):
    case = make_case(
        [(1, 1100), (37, 400), (1, 60), (1, 513)], rng, heads=(8, 4), dtype=torch.bfloat16
    )
    case, scales = quantized(case) if int8 else (case, {})
    before = rk.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            rk.set_num_threads(threads)
            results.append(rk.flash_attn_with_kvcache(*case.args, **scales))
    finally:
        rk.set_num_threads(before)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_nothing_to_do(rng):
    run(make_case([(0, 0), (0, 5)], rng), {}, rng)
    empty = make_case([], rng)
    out, lse = rk.flash_attn_with_kvcache(*empty.args, return_softmax_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


@pytest.mark.parametrize("sinks", [False, True])
def test_queries_that_see_nothing(sinks, rng):
    """kv_len 0, and more queries than keys: out 0; lse -inf, or the sink's logit."""
    run(make_case([(2, 0), (5, 3), (1, 4)], rng), {"sinks": True} if sinks else {}, rng)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kv_len", [1, 5, 8, 16, 64, 512, 600, 1024])
def test_nan_reaches_out_and_lse(kv_len, queries, dtype, rng):
    """In a query or in a key that it sees, wherever it stands among the lanes, blocks and parts of
    the keys."""
    n = min(queries, kv_len)
    for options in ({}, {"sinks": torch.randn(4, generator=rng)}):
        for position in (None, kv_len - 1, int(torch.randint(kv_len, (), generator=rng))):
            case = make_case([(n, kv_len), (1, 40)], rng, dtype=dtype)
            if position is None:
                case.q[:n, :, 3] = math.nan
            else:
                case.k_cache[case.page_table[0, position // 16], position % 16, :, 5] = math.nan
            out, lse = rk.flash_attn_with_kvcache(*case.args, **options, return_softmax_lse=True)
            seen = torch.zeros(n + 1, dtype=torch.bool)
            seen[:n] = position is None or torch.arange(kv_len - n, kv_len) >= position
            assert torch.equal(lse.isnan(), seen[:, None].expand_as(lse))
            assert torch.equal(out.isnan(), seen[:, None, None].expand_as(out))


def test_large_scores_do_not_overflow(rng):
    case = make_case([(4, 40)], rng)
    case.q *= 200
    # Scores of thousands carry errors of 1e-4 in float32, and exp hands them on.
    run(case, {}, rng, tolerance=(2e-3, 2e-2))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scores_that_grow(dtype, rng):
    """The maximum moves all along a row: what was summed before is scaled down, time and again."""
    case = make_case([(300, 300), (40, 330)], rng, dtype=dtype)
    case.q[..., 0] = 8
    for row, keys in enumerate(case.keys):
        keys[..., 0] = (torch.arange(len(keys)) / 8)[:, None].to(dtype)
        for token, key in enumerate(keys):
            case.k_cache[case.page_table[row, token // 16], token % 16] = key
    # Scores reach 41 out of sums of 330: float32 keeps 1e-5 of them, and a probability is off by as
    # much.
    run(case, {}, rng, tolerance=(3e-5, 3e-4) if dtype == torch.float32 else None)


@INT8
def test_rows_do_not_depend_on_the_batch(int8, rng):
    if rk.capabilities()["ops"]["flash_attn_with_kvcache"]["bfloat16"]["impl"][:4] != "cpu:":
        pytest.skip("the reference is torch's einsum, which promises nothing about bits")
    rows = [(1, 600), (7, 90), (1, 33), (30, 31), (280, 290)]
    case = make_case(rows, rng, dtype=torch.bfloat16)
    case.q *= 8
    case, scales = quantized(case) if int8 else (case, {})
    whole = rk.flash_attn_with_kvcache(*case.args, **scales)
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
        )
        assert_same_bits(alone, whole[begin : begin + n])
        if n < 3:
            continue
        # The last two thirds of its tokens, as another chunk of the prompt.
        part = rk.flash_attn_with_kvcache(
            case.q[begin + n // 3 : begin + n],
            case.k_cache,
            case.v_cache,
            case.page_table[row : row + 1],
            case.kv_lens[row : row + 1],
            torch.tensor([0, n - n // 3], dtype=torch.int32),
            **scales,
        )
        assert_same_bits(part, whole[begin + n // 3 : begin + n])


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "scaled_dot_product_attention"), reason="torch before 2.0"
)
def test_paged_equals_scaled_dot_product_attention(rng):
    """A third witness, torch's own."""
    case = make_case([(20, 20)], rng, heads=(4, 4))
    q, k, v = (x.double().transpose(0, 1)[None] for x in (case.q, case.keys[0], case.values[0]))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    assert_close(
        "flash_attn_with_kvcache",
        rk.flash_attn_with_kvcache(*case.args),
        expected,
        ATTENTION[torch.float32],
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_varlen(options, dtype, rng):
    options = dict(options)
    case = make_case([(1, 50), (6, 6), (0, 9), (3, 0), (25, 70)], rng, dtype=dtype)
    if options.get("sinks"):
        options["sinks"] = torch.randn(4, generator=rng)
    k = torch.cat(case.keys)
    v = torch.cat(case.values)
    lens = [key.shape[0] for key in case.keys]
    cu_k = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    expected, expected_lse = oracle(case, **options)
    out = guarded(tuple(case.q.shape), dtype)
    _, lse = rk.flash_attn_varlen(
        case.q, k, v, case.cu_seqlens_q, cu_k, **options, return_softmax_lse=True, out=out.view
    )
    out.check()
    assert_close(
        "flash_attn_varlen", out.view, expected, ATTENTION[dtype], amplitude(case, **options)
    )
    assert_close("flash_attn_varlen lse", lse, expected_lse, (4e-6, 2e-5))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (48, 112), (16, 256), (256, 16)])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_of_another_size(key_dim, value_dim, paged, dtype, rng):
    """Chunks of many tokens, a row of one token and one of none."""
    lens = [70, 300, 5, 2]
    cu_q, cu_k = (
        torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in ([40, 1, 0, 2], lens)
    )
    q = spread((43, 6, key_dim), dtype, rng)
    k = spread((377, 2, key_dim), dtype, rng)
    v = spread((377, 2, value_dim), dtype, rng)
    options = {"softmax_scale": key_dim**-0.5, "return_softmax_lse": True}
    exact = [x.double() for x in (q, k, v)]
    expected, expected_lse = rk.reference.flash_attn_varlen(*exact, cu_q, cu_k, **options)
    out = guarded((43, 6, value_dim), dtype, gap=8)
    op = "flash_attn_varlen"
    if paged:
        op = "flash_attn_with_kvcache"
        table = (cu_k[:-1, None] + torch.arange(300)).to(torch.int32)
        ints = (table, torch.tensor(lens, dtype=torch.int32), cu_q)
        _, lse = rk.flash_attn_with_kvcache(
            q, k[:, None], v[:, None], *ints, **options, out=out.view
        )
    else:
        _, lse = rk.flash_attn_varlen(q, k, v, cu_q, cu_k, **options, out=out.view)
    out.check()
    assert_close(op, out.view, expected, ATTENTION[dtype])
    assert_close(f"{op} lse", lse, expected_lse, (4e-6, 3e-5))


def test_a_page_table_without_columns(rng):
    """It has no memory."""
    q = spread((1, 4, 64), torch.float32, rng)
    cache = torch.full((3, 4, 4, 64), math.nan)
    table = torch.zeros(1, 0, dtype=torch.int32)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0], [0, 1])]
    assert not rk.flash_attn_with_kvcache(q, cache, cache, table, *ints).any()


@pytest.mark.parametrize(
    ("index", "change", "error"),
    [
        (0, lambda x: x.double(), TypeError),
        (1, lambda x: x.to(torch.bfloat16), TypeError),
        (0, lambda x: x[:, :3], ValueError),
        (0, lambda x: x[..., :32], ValueError),
        (2, lambda x: x[:, :8], ValueError),
        (3, lambda x: x.long(), TypeError),
        (3, lambda x: x[:0], ValueError),
        (4, lambda x: x.long(), TypeError),
        (5, lambda x: x[:1], ValueError),
    ],
)
def test_errors(index, change, error, rng):
    args = list(make_case([(2, 5)], rng).args)
    args[index] = change(args[index])
    with pytest.raises(error):
        rk.flash_attn_with_kvcache(*args)


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (-2, 0)},
        {"window_size": (3, 2)},
        {"softcap": -1.0},
        {"sinks": torch.ones(3)},
    ],
    ids=str,
)
def test_option_errors(options, rng):
    with pytest.raises(ValueError):
        rk.flash_attn_with_kvcache(*make_case([(2, 5)], rng).args, **options)


def test_pages_more_than_2_31_elements_apart(rng):
    case = make_case([(3, 30)], rng, heads=(2, 1), page_size=16, dtype=torch.bfloat16)
    expected = rk.flash_attn_with_kvcache(*case.args)
    near = case.k_cache, case.v_cache
    case.k_cache, case.v_cache = (distant((2, 16, 1, 64), torch.bfloat16) for _ in range(2))
    for far, cache in zip((case.k_cache, case.v_cache), near, strict=True):
        far.copy_(cache[case.page_table[0, :2].long()])
    case.page_table[0, :2] = torch.tensor([0, 1])
    assert_same_bits(rk.flash_attn_with_kvcache(*case.args), expected)
