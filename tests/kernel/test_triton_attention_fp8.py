"""The Triton attention kernels over FP8 keys and values, in both formats."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _dispatch
from tests.kernel.attention_cases import (
    make_case,
    oracle,
    varlen_args,
)
from tests.kernel.helpers import assert_close
from tests.kernel.triton_attention_cases import (
    SCALES,
    launch,
    poison_partials,
    rt,
    run,
    shorten_splits,
)
from tests.kernel.triton_device import DEVICE, TRITON_ATTENTION

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


def narrowed(case, rng, *, queries, per_head, fp8):
    """The case with FP8 keys and values, and queries, and its scales; the case of what the numbers
    stand for."""
    names = SCALES if queries else SCALES[:2]
    heads = case.q.shape[1]
    kv_heads = case.k_cache.shape[2]
    scales = {name: 0.25 + torch.rand(kv_heads if per_head else 1, generator=rng) for name in names}
    wide = {name: x.double().expand(kv_heads)[:, None] for name, x in scales.items()}
    narrow = replace(
        case,
        k_cache=case.k_cache.to(fp8),
        v_cache=case.v_cache.to(fp8),
        keys=[x.to(fp8) for x in case.keys],
        values=[x.to(fp8) for x in case.values],
    )
    exact = replace(
        narrow,
        keys=[x.double() * wide["k_scale"] for x in narrow.keys],
        values=[x.double() * wide["v_scale"] for x in narrow.values],
    )
    if queries:
        narrow.q = case.q.to(fp8)
        exact.q = narrow.q.double() * wide["q_scale"].repeat_interleave(heads // kv_heads, 0)
    return narrow, exact, scales


FP8_KINDS = {
    "prefill": ([(5, 40), (0, 7), (3, 3), (2, 0), (1, 20)], False),
    "split decode": ([(1, 70), (1, 0), (1, 23)], False),
    "contiguous": ([(5, 40), (0, 7), (3, 3), (2, 0), (1, 20)], True),
}


@pytest.mark.parametrize("rows_and_form", FP8_KINDS.values(), ids=FP8_KINDS)
@pytest.mark.parametrize("queries", [False, True], ids=["16-bit queries", "FP8 queries"])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=["ocp", "fnuz"])
def test_fp8(rows_and_form, queries, fp8, rng, short_splits):
    """Pages hold NaN in both formats wherever nothing may read."""
    rows, varlen = rows_and_form
    for per_head, dtype, options in (
        (False, torch.float16, {}),
        (
            True,
            torch.bfloat16,
            {"sinks": True, "softcap": 20.0, "window_size": (11, 0), "softmax_scale": 0.2},
        ),
    ):
        case = make_case(rows, rng, dim=32, dtype=dtype)
        case, exact, scales = narrowed(case, rng, queries=queries, per_head=per_head, fp8=fp8)
        run(case, rng, exact=exact, out_dtype=dtype, varlen=varlen, **options, **scales)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=["ocp", "fnuz"])
def test_every_fp8_number(fp8, rng):
    """One key a row: out is the value itself, its subnormals, largest and NaN included."""
    numbers = torch.arange(256, dtype=torch.uint8).view(fp8)
    v = numbers.view(16, 1, 16)
    k = torch.zeros(16, 1, 16).to(fp8)
    q = torch.randn(16, 1, 16, generator=rng)
    starts = torch.arange(17, dtype=torch.int32)
    out = torch.empty(16, 1, 16)
    one = torch.ones(1)
    args = (x.to(DEVICE) for x in (q, k, v, starts, starts))
    device_out = out.to(DEVICE)
    one = one.to(DEVICE)
    rt.flash_attn_varlen(*args, 1.0, True, -1, -1, 0.0, None, device_out, None, one, one)
    assert torch.equal(device_out.cpu().view(-1).nan_to_num(1e9), numbers.float().nan_to_num(1e9))


@pytest.mark.parametrize("op", ["flash_attn_with_kvcache", "flash_attn_varlen"])
def test_the_public_functions_reach_it(op, rng, monkeypatch):
    """With FP8, whole numbers for numbers, and every keyword where it belongs."""
    case = make_case([(3, 20), (1, 9)], rng, dim=16, dtype=torch.float16)
    case, exact, scales = narrowed(case, rng, queries=True, per_head=True, fp8=torch.float8_e4m3fn)
    options = {"softmax_scale": 1, "softcap": 5, "window_size": (7, 0), "causal": 0}
    sinks = torch.randn(4, generator=rng)
    monkeypatch.setattr(_dispatch, "native", lambda op, x: getattr(rt, op))
    args = varlen_args(case) if op == "flash_attn_varlen" else case.args
    tensors = {name: x.to(DEVICE) for name, x in {"sinks": sinks, **scales}.items()}
    got, lse = getattr(rk, op)(
        *(x.to(DEVICE) for x in args), **options, **tensors, max_seqlen_q=3, return_softmax_lse=True
    )
    expected, expected_lse = oracle(exact, sinks=sinks, **options)
    assert_close("triton flash_attn", got, expected, TRITON_ATTENTION[torch.bfloat16])
    assert_close("triton flash_attn lse", lse, expected_lse, (4e-6, 2e-5))


def test_what_fp8_wants(rng):
    case = make_case([(2, 5)], rng, dim=16, dtype=torch.float16)
    narrow, _, scales = narrowed(case, rng, queries=True, per_head=True, fp8=torch.float8_e4m3fn)
    out = torch.empty_like(case.q)
    for wrong in (
        {"q_scale": None},
        {"k_scale": torch.ones(4, device=DEVICE)[::2]},
        {"v_scale": torch.ones(1)},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            launch(narrow, out, **(scales | wrong))
    with pytest.raises(TypeError, match="out"):
        launch(narrow, out.float(), **scales)
    narrow.q = case.q.to(torch.float8_e4m3fnuz)
    with pytest.raises(TypeError, match="k_cache"):
        launch(narrow, out, **scales)
    case.k_cache, case.v_cache = (
        torch.zeros(x.shape, dtype=torch.int8) for x in (case.k_cache, case.v_cache)
    )
    with pytest.raises(NotImplementedError, match="INT8"):
        launch(case, out)
