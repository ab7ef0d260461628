"""Norm of q and k, RoPE and the KV store in one op: as the single ops do it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import radix_kernels as rk
from radix_kernels.reference.kv_cache import quantize, to_fp8
from tests.kernel.helpers import (
    FLOATS,
    FP8,
    ROUNDED_ONCE,
    assert_close,
    assert_same_bits,
    distant,
    guarded,
    spread,
)

PAGES = 9
PAGE_SIZE = 4


def case(
    rng: torch.Generator,
    tokens: int = 7,
    dim: int = 64,
    rotary: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    norm: bool = True,
    wide_weight: bool = False,
    gap: int = 0,
) -> dict[str, Any]:
    """Arguments with q, k, v as views of one buffer and caches full of NaN."""
    heads = 6
    kv_heads = 2
    qkv = spread((tokens, heads + 2 * kv_heads, dim + gap), dtype, rng)[..., :dim]
    weights = [
        spread((dim,), torch.float32 if wide_weight else dtype, rng) if norm else None
        for _ in range(2)
    ]
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=rng)[:tokens]
    if tokens > 3:
        slots[2] = -1
    caches = [
        torch.full((PAGES, PAGE_SIZE, kv_heads, dim), math.nan, dtype=dtype) for _ in range(2)
    ]
    return {
        "q": qkv[:, :heads],
        "k": qkv[:, heads : heads + kv_heads],
        "v": qkv[:, heads + kv_heads :],
        "q_weight": weights[0],
        "k_weight": weights[1],
        "cos_sin_cache": rk.rope_cos_sin_cache(rotary or dim, 300, 1e4),
        "positions": torch.randint(0, 300, (tokens,), generator=rng),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slot_mapping": slots,
    }


def oracle(
    args: dict[str, Any], is_neox: bool = True, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k in float64, from the definitions of the single ops."""
    results = []
    for name in "qk":
        x = args[name].double()
        weight = args[f"{name}_weight"]
        if weight is not None:
            x = rk.reference.rmsnorm(x, weight, eps)
        else:
            x = x.clone()
        rk.reference.apply_rope_inplace(
            args["positions"], x, None, x.shape[2], args["cos_sin_cache"], is_neox=is_neox
        )
        results.append(x)
    return results[0], results[1]


def check(args: dict[str, Any], dtype: torch.dtype, is_neox: bool, **keywords: Any) -> None:
    before = {name: args[name].clone() for name in "kv"}
    q, k = oracle(args, is_neox, **keywords)
    rk.fused_qk_norm_rope_store(**args, is_neox=is_neox, **keywords)
    assert_close("fused_qk_norm_rope_store", args["q"], q, ROUNDED_ONCE[dtype])
    for name in "kv":
        assert_same_bits(args[name], before[name])
    slots = args["slot_mapping"]
    stored = torch.zeros(PAGES * PAGE_SIZE, dtype=torch.bool)
    kept = slots >= 0
    stored[slots[kept]] = True
    k_cache, v_cache = (args[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    assert_close("fused_qk_norm_rope_store", k_cache[slots[kept]], k[kept], ROUNDED_ONCE[dtype])
    assert_same_bits(v_cache[slots[kept]], before["v"][kept])
    assert torch.isnan(k_cache[~stored]).all() and torch.isnan(v_cache[~stored]).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 13])
@pytest.mark.parametrize(
    ("dim", "rotary"), [(128, 128), (64, 64), (80, 80), (256, 64), (96, 24), (34, 10), (2, 2)]
)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("is_neox", [True, False])
def test_equals_the_ops_one_after_the_other(dtype, tokens, dim, rotary, norm, is_neox, rng):
    check(case(rng, tokens, dim, rotary, dtype, norm=norm), dtype, is_neox)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
def test_float32_weights_int32_positions_odd_strides(dtype, is_neox, rng):
    args = case(rng, dim=128, dtype=dtype, wide_weight=True, gap=3)
    args["positions"] = args["positions"].int()
    check(args, dtype, is_neox, eps=1e-3)


def test_cache_as_views_and_guards(rng):
    """A pool with K and V side by side, heads before slots; what lies between keeps its NaN."""
    args = case(rng)
    pool = torch.full((PAGES, 2, 2, PAGE_SIZE, 80), math.nan, dtype=torch.bfloat16)
    args["k_cache"], args["v_cache"] = (pool[:, i, :, :, :64].transpose(1, 2) for i in range(2))
    check(args, torch.bfloat16, True)
    assert torch.isnan(pool[..., 64:]).all()
    buffer = guarded((7, 10, 64), torch.bfloat16, gap=8)
    buffer.view.copy_(spread((7, 10, 64), torch.bfloat16, rng))
    args |= {"q": buffer.view[:, :6], "k": buffer.view[:, 6:8], "v": buffer.view[:, 8:]}
    check(args, torch.bfloat16, True)
    buffer.check()


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("dim", "rotary"), [(128, 128), (96, 24), (34, 10)])
def test_int8_caches(dtype, norm, dim, rotary, rng):
    """A code is off by one at most, where float32 and float64 fall on two sides of a border."""
    args = case(rng, 13, dim, rotary, dtype, norm=norm)
    plain = {name: x.clone() if name in ("q", "k_cache", "v_cache") else x
             for name, x in args.items()}  # fmt: skip
    rk.fused_qk_norm_rope_store(**plain)
    _, k = oracle(args)
    caches = {n: torch.full((PAGES, PAGE_SIZE, 2, dim), 99, dtype=torch.int8) for n in "kv"}
    scales = {n: torch.full((PAGES, PAGE_SIZE, 2), -1.0) for n in "kv"}
    stored = {"k_cache": caches["k"], "v_cache": caches["v"]}
    scaled = {"k_scale": scales["k"], "v_scale": scales["v"]}
    rk.fused_qk_norm_rope_store(**args | stored, **scaled)
    assert_same_bits(args["q"], plain["q"])
    slots = args["slot_mapping"][args["slot_mapping"] >= 0]
    kept = args["slot_mapping"] >= 0
    values, scale = quantize(args["v"][kept])
    assert torch.equal(caches["v"].flatten(0, 1)[slots], values)
    assert torch.equal(scales["v"].flatten(0, 1)[slots], scale)
    codes = caches["k"].flatten(0, 1)[slots].double()
    found = scales["k"].flatten(0, 1)[slots].double()
    assert ((found - k[kept].abs().amax(-1) / 127).abs() <= 1e-5 * found).all()
    assert (codes * found[..., None] - k[kept]).abs().le(0.5001 * found[..., None]).all()
    for name in "kv":
        untouched = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool)
        untouched[slots] = False
        assert (caches[name].flatten(0, 1)[untouched] == 99).all()
        assert (scales[name].flatten(0, 1)[untouched] == -1).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("dim", "rotary"), [(128, 128), (64, 32), (34, 10)])
def test_fp8_caches(dtype, count, dim, rotary, rng):
    """The codes of the definition; a key may fall on the other side of a border."""
    args = case(rng, 13, dim, rotary, dtype)
    _, k = oracle(args)
    scales = {n: torch.rand(count, generator=rng) / 20 + 0.01 for n in "kv"}
    kind = FP8
    largest = torch.finfo(kind).max
    caches = {n: torch.zeros(PAGES, PAGE_SIZE, 2, dim, dtype=torch.uint8) for n in "kv"}
    stored = {f"{n}_cache": cache.view(kind) for n, cache in caches.items()}
    given = {f"{n}_scale": scale for n, scale in scales.items()}
    rk.fused_qk_norm_rope_store(**args | stored, **given)
    kept = args["slot_mapping"] >= 0
    slots = args["slot_mapping"][kept]
    values = to_fp8(args["v"][kept], scales["v"], kind)
    assert torch.equal(caches["v"].flatten(0, 1)[slots].view(kind).float(), values.float())
    found = caches["k"].flatten(0, 1)[slots].view(kind).double()
    wanted = (k[kept] / scales["k"].double()[:, None]).clamp(-largest, largest)
    assert ((found - wanted).abs() <= wanted.abs() / 16 * 1.001 + 2**-10).all()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"k_scale": torch.ones(PAGES, PAGE_SIZE, 2)}, ValueError),
        ({"k_cache": torch.zeros(PAGES, PAGE_SIZE, 2, 64, dtype=torch.int8)}, ValueError),
        ({"k_cache": torch.zeros(PAGES, PAGE_SIZE, 2, 64, dtype=torch.int8),
          "k_scale": torch.ones(PAGES, PAGE_SIZE, 2)}, TypeError),
        ({"k_cache": torch.zeros(PAGES, PAGE_SIZE, 2, 64, dtype=torch.int8),
          "k_scale": torch.ones(PAGES, PAGE_SIZE)}, ValueError),
    ],
)  # fmt: skip
@pytest.mark.cpu_only
def test_scales_belong_to_quantized_caches(changes, error, rng):
    with pytest.raises(error):
        rk.fused_qk_norm_rope_store(**case(rng) | changes)


def test_a_token_does_not_depend_on_the_others(rng):
    args = case(rng, tokens=21, dim=128)
    alone = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    rk.fused_qk_norm_rope_store(**args)
    for t in range(21):
        one = alone | {
            name: alone[name][t : t + 1] for name in ("q", "k", "v", "positions", "slot_mapping")
        }
        rk.fused_qk_norm_rope_store(**one)
        assert_same_bits(one["q"][0], args["q"][t])
    for name in ("k_cache", "v_cache"):
        assert_same_bits(alone[name].nan_to_num(5.0), args[name].nan_to_num(5.0))


@pytest.mark.parametrize("dim", [64, 34])
def test_a_table_without_positions(dim, rng, request):
    """No token has a position: nothing is read from it, and nothing is written."""
    args = case(rng, dim=dim)
    args["cos_sin_cache"] = args["cos_sin_cache"][:0].clone()
    before = {name: args[name].clone() for name in ("q", "k_cache", "v_cache")}
    if request.config.getoption("--device") == "cpu":
        with pytest.raises(ValueError, match="positions"):
            rk.fused_qk_norm_rope_store(**args)
    else:
        rk.fused_qk_norm_rope_store(**args)
    for name, x in before.items():
        assert_same_bits(args[name], x)


def test_a_nan_stays_in_its_head(rng):
    args = case(rng, tokens=3)
    args["q"][1, 2, 5] = math.nan
    args["v"][1, 1, 7] = math.nan
    args["slot_mapping"] = torch.tensor([0, 1, 2])
    rk.fused_qk_norm_rope_store(**args)
    assert torch.isnan(args["q"]).any(-1).nonzero().tolist() == [[1, 2]]
    assert not torch.isnan(args["k_cache"].flatten(0, 1)[:3]).any()
    assert torch.isnan(args["v_cache"].flatten(0, 1)[:3]).nonzero().tolist() == [[1, 1, 7]]


def test_tokens_more_than_2_31_elements_apart(rng):
    args = case(rng, tokens=2)
    args["slot_mapping"] = torch.tensor([3, 8])
    far = distant((2, 6, 64), torch.bfloat16)
    near = args["q"].clone()
    far.copy_(near)
    rk.fused_qk_norm_rope_store(**args | {"q": far})
    rk.fused_qk_norm_rope_store(**args | {"q": near})
    assert_same_bits(far, near)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("q", torch.ones(2, 6, 64, dtype=torch.float64), TypeError),
        ("q", torch.ones(2, 384), ValueError),
        ("k", torch.ones(2, 2, 64, dtype=torch.float16), TypeError),
        ("k", torch.ones(3, 2, 64), ValueError),
        ("v", torch.ones(2, 3, 64), ValueError),
        ("q_weight", None, ValueError),
        ("q_weight", torch.ones(32), ValueError),
        ("k_weight", torch.ones(64, dtype=torch.float16), TypeError),
        ("cos_sin_cache", torch.ones(300, 128), ValueError),
        ("cos_sin_cache", torch.ones(300, 64, dtype=torch.float64), TypeError),
        ("positions", torch.zeros(3, dtype=torch.int64), ValueError),
        ("positions", torch.zeros(2), TypeError),
        ("k_cache", torch.ones(PAGES, PAGE_SIZE, 3, 64), ValueError),
        ("v_cache", torch.ones(PAGES, PAGE_SIZE, 2, 32), ValueError),
        ("v_cache", torch.ones(PAGES + 1, PAGE_SIZE, 2, 64), ValueError),
        ("slot_mapping", torch.zeros(2, dtype=torch.int32), TypeError),
        pytest.param("positions", torch.tensor([0, 300]), ValueError, marks=pytest.mark.cpu_only),
        pytest.param("positions", torch.tensor([-1, 0]), ValueError, marks=pytest.mark.cpu_only),
        pytest.param("slot_mapping", torch.tensor([0, -2]), ValueError, marks=pytest.mark.cpu_only),
        pytest.param(
            "slot_mapping",
            torch.tensor([0, PAGES * PAGE_SIZE]),
            ValueError,
            marks=pytest.mark.cpu_only,
        ),
    ],
)
def test_errors_leave_the_tensors_alone(name, value, error, rng):
    args = case(rng, tokens=2, dtype=torch.float32) | {name: value}
    q = args["q"].clone()
    with pytest.raises(error):
        rk.fused_qk_norm_rope_store(**args)
    assert_same_bits(args["q"].float(), q.float())
    assert all(torch.isnan(args[n]).all() or n == name for n in ("k_cache", "v_cache"))


def test_an_odd_head_is_not_supported(rng, pytestconfig):
    if pytestconfig.getoption("--device") == "rocm-sim":
        pytest.skip("the reference, which refuses it, takes no arrays of the executor")
    args = case(rng, dim=64)
    views = {n: args[n][..., :63] for n in ("q", "k", "v", "k_cache", "v_cache")}
    weights = {n: args[n][:63].contiguous() for n in ("q_weight", "k_weight")}
    table = {"cos_sin_cache": rk.rope_cos_sin_cache(32, 300, 1e4)}
    with pytest.raises((ValueError, NotImplementedError), match="head dimension 63"):
        rk.fused_qk_norm_rope_store(**args | views | weights | table)
