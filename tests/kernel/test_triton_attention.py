"""The Triton kernels in Triton's interpreter on the CPU, or on the GPU where there is one."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from tests.kernel.attention_cases import (
    amplitude,
    make_case,
    oracle,
    random_rows,
    varlen_args,
)
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits
from tests.kernel.triton_attention_cases import (
    TRITON_ATTENTION,
    launch,
    poison_partials,
    rt,
    run,
    shorten_splits,
)
from tests.kernel.triton_device import DEVICE, GPU

pytestmark = [
    pytest.mark.cover("values"),
    pytest.mark.usefixtures("interpreter_widens_bfloat16"),
]


@pytest.fixture(autouse=True)
def _poisoned_partials(monkeypatch):
    poison_partials(monkeypatch)


@pytest.fixture
def short_splits(monkeypatch):
    shorten_splits(monkeypatch)


def test_the_public_function_by_name(rng):
    """With everything that the serving runtime passes."""
    case = make_case([(1, 9), (6, 20)], rng, dim=32)
    options = {"softcap": 5.0, "window_size": (7, -1), "softmax_scale": 0.3}
    sinks = torch.randn(case.q.shape[1], generator=rng)
    expected, _ = oracle(case, sinks=sinks, **options)
    out = rk.flash_attn_with_kvcache(
        *(x.to(DEVICE) for x in case.args),
        sinks=sinks.to(DEVICE),
        max_seqlen_q=6,
        implementation="triton",
        **options,
    )
    rounded = amplitude(case, sinks=sinks, **options)
    assert_close("triton flash_attn", out.cpu(), expected, TRITON_ATTENTION[torch.float32], rounded)


OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "window": {"window_size": (5, 0)},
    "window without causal": {"window_size": (9, -1), "causal": False},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all": {"sinks": True, "softcap": 20.0, "window_size": (11, 0), "softmax_scale": 0.2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_options(options, kind, rng):
    rows = [(5, 40), (0, 7), (3, 3), (1, 20)] if kind == "prefill" else [(1, 40), (1, 1), (1, 23)]
    run(make_case(rows, rng, dim=32), rng, **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(16, (2, 2)), (80, (6, 2)), (64, (5, 1))])
def test_dtypes_heads_and_dims(dtype, dim, heads, rng):
    run(make_case([(1, 30), (7, 19)], rng, dtype=dtype, dim=dim, heads=heads), rng)
    run(make_case([(1, 30), (1, 19)], rng, dtype=dtype, dim=dim, heads=heads), rng)


@pytest.mark.parametrize("dims", [(48, 32), (16, 80)], ids=str)
def test_values_of_another_size(dims, rng, short_splits):
    run(make_case([(5, 30), (1, 19)], rng, dim=dims[0], v_dim=dims[1]), rng)
    run(make_case([(1, 90), (1, 19)], rng, dim=dims[0], v_dim=dims[1]), rng)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("hnd", [False, True])
def test_page_sizes(page_size, hnd, rng):
    rows = random_rows(3, rng, longest=40)
    run(make_case(rows, rng, page_size=page_size, hnd=hnd, dim=16, gap=16), rng)


@pytest.mark.parametrize("options", [{}, {"window_size": (70, 0), "sinks": True}], ids=str)
def test_split_decode(options, rng, short_splits):
    """Rows of one, two and three splits; the middle of a window may miss whole splits."""
    rows = [(1, 140), (1, 64), (1, 65), (1, 3), (1, 0)]
    case = make_case(rows, rng, dim=16, heads=(4, 2), page_size=16)
    assert rt.choose_split(case.page_table.shape[1] * 16) == (64, 3)
    run(case, rng, **options)


@pytest.mark.parametrize("sinks", [False, True])
def test_queries_that_see_nothing(sinks, rng):
    options = {"sinks": True} if sinks else {}
    run(make_case([(2, 0), (5, 3)], rng, dim=16), rng, **options)
    run(make_case([(1, 0), (1, 3)], rng, dim=16), rng, **options)


@pytest.mark.parametrize("rows", [[(3, 40)], [(1, 40)], [(1, 100)]], ids=str)
@pytest.mark.parametrize("where", ["query", "key"])
def test_nan_reaches_out_and_lse(rows, where, rng, short_splits):
    """In prefill, decode, and decode over two splits."""
    case = make_case(rows, rng, dim=16)
    last = rows[0][1] - 1
    case.q[:, :, 3] = math.nan
    if where == "key":
        case.q.nan_to_num_(0.5)
        case.k_cache[case.page_table[0, last // 16], last % 16, :, 5] = math.nan
    out = torch.zeros_like(case.q)
    lse = torch.zeros(case.q.shape[:2])
    launch(case, out, lse=lse)
    first = 0 if where == "query" else rows[0][0] - 1  # only the last query sees the last key
    assert out[first:].isnan().all() and lse[first:].isnan().all()
    assert not out[:first].isnan().any() and not lse[:first].isnan().any()


def test_rows_do_not_depend_on_the_batch(rng, short_splits):
    rows = [(1, 100), (1, 33), (1, 66)]
    case = make_case(rows, rng, dim=16, page_size=16)
    whole = torch.empty_like(case.q)
    launch(case, whole)
    for row in range(len(rows)):
        alone = make_case([], rng, dim=16)
        alone.q = case.q[row : row + 1]
        alone.k_cache = case.k_cache
        alone.v_cache = case.v_cache
        alone.page_table = case.page_table[row : row + 1]
        alone.kv_lens = case.kv_lens[row : row + 1]
        alone.cu_seqlens_q = torch.tensor([0, 1], dtype=torch.int32)
        out = torch.empty_like(alone.q)
        launch(alone, out)
        assert_same_bits(out, whole[row : row + 1])


def test_choices_depend_on_shapes_alone():
    assert rt.choose_split(1) == (512, 1)
    assert rt.choose_split(513) == (512, 2)
    keys, splits = rt.choose_split(131072)
    assert keys * splits >= 131072 and splits <= 64 and keys & (keys - 1) == 0
    for dim in range(16, 257, 16):
        for itemsize in (2, 4):
            tiles = rt.choose_tiles(dim, 4, itemsize, True)
            assert tiles.block_m >= 16 and tiles.block_n >= 16


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_contiguous_keys(options, rng):
    """Ragged rows, some of them without queries or keys."""
    rows = [(5, 40), (0, 7), (3, 3), (2, 0), (1, 20), (3, 1)]
    run(make_case(rows, rng, dim=32), rng, varlen=True, **options)
    run(make_case([(1, 40), (1, 0), (1, 23)], rng, dim=32), rng, varlen=True, **options)


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_heads_of_192_and_128(dtype, rng):
    run(
        make_case([(5, 30), (0, 3), (2, 2)], rng, dim=192, v_dim=128, heads=(3, 3), dtype=dtype),
        rng,
        varlen=True,
    )


def test_contiguous_keys_of_other_rows_are_not_used(rng):
    case = make_case([(3, 20), (2, 9), (4, 33)], rng, dim=16)
    clean = torch.empty_like(case.q)
    dirty = torch.empty_like(case.q)
    launch(case, clean, varlen=True)
    case.keys[1].fill_(math.nan)
    case.values[1].fill_(math.nan)
    launch(case, dirty, varlen=True)
    assert dirty[3:5].isnan().all()
    for rows in (slice(3), slice(5, None)):
        assert_same_bits(dirty[rows], clean[rows])


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_tokens_of_no_row_are_left_alone(kind, rng, short_splits):
    """Before the first row and behind the last, as in each of the two calls of a mixed batch."""
    rows = [(1, 70), (0, 3), (1, 130)] if kind == "decode" else [(5, 70), (0, 3), (9, 20)]
    case = make_case(rows, rng, dim=16)
    alone = torch.empty_like(case.q)
    launch(case, alone, max_seqlen_q=1 if kind == "decode" else 0)
    before, behind = 3, 40
    stray = torch.full((before + behind, *case.q.shape[1:]), math.nan, dtype=case.q.dtype)
    case.q = torch.cat([stray[:before], case.q, stray[before:]])
    case.cu_seqlens_q = case.cu_seqlens_q + before
    out = torch.full_like(case.q, 7.0)
    lse = torch.full(case.q.shape[:2], 7.0)
    launch(case, out, lse=lse, max_seqlen_q=1 if kind == "decode" else 0)
    assert_same_bits(out[before:-behind], alone)
    for x in (out, lse):
        assert (x[:before] == 7).all() and (x[-behind:] == 7).all()
        assert not (x[before:-behind] == 7).any()


def test_the_hint_chooses_decode(rng, monkeypatch, short_splits):
    """max_seqlen_q of 1 splits the keys where a row without queries hides that it is decode; other
    hints do not."""
    seen = []
    original = rt._partials

    def partials(q, splits, dim):
        seen.append(splits)
        return original(q, splits, dim)

    monkeypatch.setattr(rt, "_partials", partials)
    for rows, hint in (
        ([(1, 70), (0, 3)], 1),
        ([(1, 70), (0, 3)], 0),
        ([(2, 70), (0, 3)], 2),
        ([(1, 70)], 0),
    ):
        run(make_case(rows, rng, dim=16), rng, max_seqlen_q=hint)
    assert [splits > 1 for splits in seen] == [True, False, False, True]


def far(x, dim):
    """x with a step along `dim` below 2**31, its last index past it: only 64-bit products find
    that.

    The memory between is reserved and never touched.
    """
    inner = x.numel() // x.shape[dim]
    step = -(-(2**31 // (x.shape[dim] - 1) + 64) // 16) * 16
    strides = list(x[(slice(None),) * dim + (slice(1),)].contiguous().stride())
    strides[dim] = step
    buffer = torch.empty(step * (x.shape[dim] - 1) + inner, dtype=x.dtype)
    return buffer.as_strided(x.shape, strides).copy_(x)


@pytest.mark.skipif(GPU, reason="the memory between is not free there")
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    "rows", [[(3, 20)], [(1, 70), (1, 3), (1, 0)]], ids=["prefill", "split decode"]
)
def test_far_strides(dim, rows, rng, short_splits):
    case = make_case(rows, rng, dim=16, heads=(3, 3), dtype=torch.float16)
    near = torch.empty_like(case.q)
    launch(case, near)
    out = torch.zeros_like(near)
    case.k_cache = far(case.k_cache, dim)
    case.v_cache = far(case.v_cache, dim)
    if dim < 2:
        case.q = far(case.q, dim)
        out = far(out, dim)
    if dim == 0 and len(rows) > 1:
        case.page_table = far(case.page_table, 0)
    launch(case, out)
    assert_same_bits(out, near)


@pytest.mark.skipif(GPU, reason="the memory between is not free there")
@pytest.mark.parametrize("dim", [0, 1])
def test_far_strides_of_contiguous_keys(dim, rng):
    q, k, v, *starts = varlen_args(
        make_case([(2, 3), (3, 9)], rng, dim=16, heads=(3, 3), dtype=torch.float16)
    )
    near = torch.empty_like(q)
    out = torch.zeros_like(q)
    for keys, values, to in ((k, v, near), (far(k, dim), far(v, dim), out)):
        rt.flash_attn_varlen(q, keys, values, *starts, 0.25, True, -1, -1, 0.0, None, to, None)
    assert_same_bits(out, near)


@pytest.mark.parametrize("left", [1, 16, 2**31 - 1, 2**40])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_at_the_ends_of_integers(left, causal, rng):
    run(
        make_case([(5, 40), (9, 4), (1, 1)], rng, dim=16),
        rng,
        window_size=(left, -1),
        causal=causal,
    )


@pytest.mark.parametrize("softcap", [0.01, 3.0, 1e3, 1e8])
def test_soft_caps_far_from_the_scores(softcap, rng):
    run(make_case([(3, 40)], rng, dim=16), rng, softcap=softcap)


def test_sinks_side_by_side(rng):
    case = make_case([(2, 5)], rng, dim=16)
    with pytest.raises(ValueError, match="sinks has last stride 2"):
        launch(case, torch.empty_like(case.q), sinks=torch.randn(8, device=DEVICE)[::2])


def test_one_device(rng):
    case = make_case([(2, 5)], rng, dim=16)
    elsewhere = torch.device("meta")
    for name, change in (("sinks", {"sinks": torch.ones(4, device=elsewhere)}), ("kv_lens", {})):
        if not change:
            case.kv_lens = case.kv_lens.to(elsewhere)
        with pytest.raises(ValueError, match=f"{name} is on meta"):
            rt.flash_attn_with_kvcache(
                *case.args,
                1.0,
                True,
                -1,
                -1,
                0.0,
                change.get("sinks"),
                torch.empty_like(case.q),
                None,
            )


def test_errors(rng):
    case = make_case([(2, 5)], rng, dim=16)
    with pytest.raises(ValueError, match="out"):
        launch(case, torch.empty(1, 4, 16))
    for softcap in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="softcap"):
            launch(case, torch.empty_like(case.q), softcap=softcap)
    case.page_table = case.page_table[:0]
    case.kv_lens = case.kv_lens[:0]
    case.cu_seqlens_q = case.cu_seqlens_q[:1]
    with pytest.raises(ValueError, match="no rows"):
        launch(case, torch.empty_like(case.q))
