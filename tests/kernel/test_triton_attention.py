"""The Triton kernels in Triton's interpreter on the CPU, or on the GPU where there is one."""

from __future__ import annotations

import importlib.util
import math
import os

import pytest
import torch

from tests.kernel.attention_cases import make_case, oracle, random_rows
from tests.kernel.helpers import ATTENTION, FLOATS, assert_close, assert_same_bits, guarded

if importlib.util.find_spec("triton") is None:
    if "triton" in os.environ.get("REQUIRE", ""):
        raise ImportError("REQUIRE names triton, but it is not installed")
    pytest.skip("triton is not installed", allow_module_level=True)

from radix_kernels.triton import attention as rt

GPU = torch.cuda.is_available()  # without one, conftest turns the interpreter on
DEVICE = "cuda" if GPU else "cpu"
# The interpreter cuts float32 to bfloat16 where a chip rounds to the nearest.
TOLERANCE = ATTENTION if GPU else {**ATTENTION, torch.bfloat16: (1e-2, 3e-2)}
pytestmark = pytest.mark.usefixtures("interpreter_widens_bfloat16")


@pytest.fixture(autouse=True)
def _poisoned_partials(monkeypatch):
    """What a split has not written must not be used."""
    original = rt._partials

    def partials(q, splits, dim):
        parts = original(q, splits, dim)
        return tuple(None if part is None else part.fill_(float("nan")) for part in parts)

    monkeypatch.setattr(rt, "_partials", partials)


def launch(case, out, *, lse=None, **options):
    left, right = options.get("window_size", (-1, -1))
    sinks = options.get("sinks")
    device_out = out.to(DEVICE)
    device_lse = None if lse is None else lse.to(DEVICE)
    rt.flash_attn_with_kvcache(
        *(x.to(DEVICE) for x in case.args),
        options.get("softmax_scale", case.q.shape[-1] ** -0.5),
        options.get("causal", True),
        left,
        right,
        options.get("softcap", 0.0),
        None if sinks is None else sinks.to(DEVICE),
        device_out,
        device_lse,
    )
    if GPU:
        out.copy_(device_out)
        if lse is not None:
            lse.copy_(device_lse)


def run(case, rng, **options):
    if options.get("sinks"):
        options["sinks"] = torch.randn(case.q.shape[1], generator=rng)
    dtype = case.q.dtype
    expected, expected_lse = oracle(case, **options)
    out = guarded(tuple(expected.shape), dtype, gap=8)
    lse = torch.full(case.q.shape[:2], float("nan"))
    launch(case, out.view, lse=lse, **options)
    out.check()
    assert_close("triton flash_attn_with_kvcache", out.view, expected, TOLERANCE[dtype])
    assert_close("triton flash_attn_with_kvcache lse", lse, expected_lse, (4e-6, 2e-5))


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
def test_values_of_another_size(dims, rng):
    run(make_case([(5, 30), (1, 19)], rng, dim=dims[0], v_dim=dims[1]), rng)
    run(make_case([(1, 600), (1, 19)], rng, dim=dims[0], v_dim=dims[1]), rng)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("hnd", [False, True])
def test_page_sizes(page_size, hnd, rng):
    rows = random_rows(3, rng, longest=40)
    run(make_case(rows, rng, page_size=page_size, hnd=hnd, dim=16, gap=16), rng)


@pytest.mark.parametrize("options", [{}, {"window_size": (700, 0), "sinks": True}], ids=str)
def test_split_decode(options, rng):
    """Rows of one, two and three splits; the middle of a window may miss whole splits."""
    rows = [(1, 1100), (1, 512), (1, 513), (1, 3), (1, 0)]
    case = make_case(rows, rng, dim=16, heads=(4, 2), page_size=64)
    assert rt.choose_split(case.page_table.shape[1] * 64) == (512, 3)
    run(case, rng, **options)


@pytest.mark.parametrize("sinks", [False, True])
def test_queries_that_see_nothing(sinks, rng):
    options = {"sinks": True} if sinks else {}
    run(make_case([(2, 0), (5, 3)], rng, dim=16), rng, **options)
    run(make_case([(1, 0), (1, 3)], rng, dim=16), rng, **options)


@pytest.mark.parametrize("rows", [[(3, 40)], [(1, 40)], [(1, 600)]], ids=str)
@pytest.mark.parametrize("where", ["query", "key"])
def test_nan_reaches_out_and_lse(rows, where, rng):
    """In prefill, decode, and decode over two splits."""
    case = make_case(rows, rng, dim=16)
    last = rows[0][1] - 1
    case.q[:, :, 3] = math.nan
    if where == "key":
        case.q.nan_to_num_(0.5)
        case.k_cache[case.page_table[0, last // 16], last % 16, :, 5] = math.nan
    out, lse = torch.zeros_like(case.q), torch.zeros(case.q.shape[:2])
    launch(case, out, lse=lse)
    first = 0 if where == "query" else rows[0][0] - 1  # only the last query sees the last key
    assert out[first:].isnan().all() and lse[first:].isnan().all()
    assert not out[:first].isnan().any() and not lse[:first].isnan().any()


def test_rows_do_not_depend_on_the_batch(rng):
    rows = [(1, 600), (1, 33), (1, 90)]
    case = make_case(rows, rng, dim=16, page_size=16)
    whole = torch.empty_like(case.q)
    launch(case, whole)
    for row in range(len(rows)):
        alone = make_case([], rng, dim=16)
        alone.q, alone.k_cache, alone.v_cache = case.q[row : row + 1], case.k_cache, case.v_cache
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


def test_errors(rng):
    case = make_case([(2, 5)], rng, dim=16)
    with pytest.raises(ValueError, match="out"):
        launch(case, torch.empty(1, 4, 16))
    with pytest.raises(ValueError, match="softcap"):
        launch(case, torch.empty_like(case.q), softcap=-1.0)
