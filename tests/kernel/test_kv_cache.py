from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from tests.kernel import gpu_objects
from tests.kernel.helpers import (
    FLOATS,
    FP8,
    FP8_CODES,
    FP8_MAX,
    assert_same_bits,
    distant,
    spread,
)

needs_fp8 = pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="this torch has no FP8")


def layouts(pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype):
    """Both caches as plain tensors, as HND views, and interleaved in one pool."""

    def poison(*shape: int) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=dtype)

    yield poison(pages, page_size, heads, dim), poison(pages, page_size, heads, dim)
    hnd = [poison(pages, heads, page_size, dim).transpose(1, 2) for _ in range(2)]
    yield hnd[0], hnd[1]
    pool = poison(pages, page_size, 2, heads, dim + 16)[..., :dim]
    yield pool[:, :, 0], pool[:, :, 1]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_store(dtype, page_size, tokens, rng):
    pages = 40
    heads = 3
    dim = 48
    for k_cache, v_cache in layouts(pages, page_size, heads, dim, dtype):
        qkv = spread((tokens, 2 * heads + 4, dim), dtype, rng)
        k = qkv[:, 1 : 1 + heads]
        v = qkv[:, heads + 2 : 2 * heads + 2]
        slots = torch.randperm(pages * page_size, generator=rng)[:tokens]
        if tokens > 3:
            slots[[0, 3]] = -1
        rk.store_kv_cache(k, v, k_cache, v_cache, slots)
        for source, cache in ((k, k_cache), (v, v_cache)):
            expected = torch.full((pages * page_size, heads, dim), math.nan, dtype=dtype)
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    expected[slot] = source[token]
            got = cache.reshape(pages * page_size, heads, dim)
            assert torch.equal(torch.isnan(got), torch.isnan(expected))
            assert_same_bits(got.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_bits_are_copied():
    """Signalling values, infinities and negative zero arrive as they left."""
    k = torch.tensor([-0.0, math.inf, -math.inf, 1e-40]).repeat(4).view(1, 1, 16)
    caches = [torch.zeros(2, 4, 1, 16) for _ in range(2)]
    rk.store_kv_cache(k, -k, *caches, torch.tensor([6]))
    assert_same_bits(caches[0][1, 2], k[0])
    assert_same_bits(caches[1][1, 2], -k[0])


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [16, 48, 100, 256])
@pytest.mark.parametrize("hnd", [False, True])
def test_int8(dtype, dim, hnd, rng):
    """Values and scales are those of the definition, bit by bit; what no slot names stays."""
    pages = 6
    page_size = 5
    heads = 3
    tokens = 17
    shape = (pages, heads, page_size) if hnd else (pages, page_size, heads)
    caches = [torch.full((*shape, dim), 77, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full(shape, -1.0) for _ in range(2)]
    if hnd:
        caches, scales = ([x.transpose(1, 2) for x in xs] for xs in (caches, scales))
    rows = spread((tokens, 2 * heads, dim), dtype, rng)
    rows[2, 1] = 0
    slots = torch.randperm(pages * page_size, generator=rng)[:tokens]
    slots[4] = -1
    rk.store_kv_cache(
        rows[:, :heads], rows[:, heads:], *caches, slots, k_scale=scales[0], v_scale=scales[1]
    )
    for source, cache, scale in zip(
        (rows[:, :heads], rows[:, heads:]), caches, scales, strict=True
    ):
        values = torch.full((pages * page_size, heads, dim), 77)
        factors = torch.full((pages * page_size, heads), -1.0)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                wide = source[token].float()
                factors[slot] = wide.abs().amax(-1) / 127
                values[slot] = (wide / factors[slot][:, None]).nan_to_num(0).round().long()
        assert torch.equal(cache.reshape(-1, heads, dim).long(), values)
        assert_same_bits(scale.reshape(-1, heads), factors)


@pytest.mark.cpu_only
def test_int8_errors():
    k = torch.ones(2, 1, 16)
    caches = [torch.zeros(2, 4, 1, 16, dtype=torch.int8) for _ in range(2)]
    scale = torch.zeros(2, 4, 1)
    slots = torch.tensor([0, 1])
    for wrong in ({}, {"k_scale": scale}, {"k_scale": scale, "v_scale": torch.zeros(2, 4)}):
        with pytest.raises(ValueError):
            rk.store_kv_cache(k, k, *caches, slots, **wrong)
    with pytest.raises(TypeError):
        rk.store_kv_cache(k, k, *caches, slots, k_scale=scale, v_scale=scale.double())
    with pytest.raises(ValueError):
        rk.store_kv_cache(
            k,
            k,
            torch.zeros(2, 4, 1, 16),
            torch.zeros(2, 4, 1, 16),
            slots,
            k_scale=scale,
            v_scale=scale,
        )
    with pytest.raises(TypeError):
        rk.store_kv_cache(
            k, k, caches[0], torch.zeros(2, 4, 1, 16), slots, k_scale=scale, v_scale=scale
        )


def nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The values of float32 x in e4m3: the nearest, of two the one with an even code, at most the
    largest; searched for."""
    values = torch.arange(FP8_CODES, dtype=torch.uint8).view(FP8).double()
    size = x.double().abs().clamp(max=FP8_MAX).nan_to_num(0)
    above = torch.searchsorted(values, size).clamp(1, FP8_CODES - 1)
    low = size - values[above - 1]
    high = values[above] - size
    code = torch.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return torch.where(x.isnan(), math.nan, values[code] * x.sign())


@needs_fp8
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [16, 100, 128])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("hnd", [False, True])
def test_fp8(dtype, dim, per_head, hnd, rng):
    pages = 6
    page_size = 5
    heads = 3
    tokens = 17
    shape = (pages, heads, page_size, dim) if hnd else (pages, page_size, heads, dim)
    caches = [torch.full(shape, 0x55, dtype=torch.uint8).view(FP8) for _ in range(2)]
    caches = [x.transpose(1, 2) for x in caches] if hnd else caches
    sizes = torch.randint(-14, 12, (tokens, 2 * heads, 1), generator=rng)
    rows = (torch.randn(tokens, 2 * heads, dim, generator=rng) * 2.0**sizes).to(dtype)
    rows[2, 1] = 0
    rows[3, :, 0] = math.nan
    rows[4, :, :3] = torch.tensor([math.inf, -math.inf, 2**-10])
    # Halfway between two numbers of FP8.
    rows[5] = (
        torch.tensor([8.5, 9.5, -17, 2**-10 * 3]).repeat(heads * dim // 2).view(2 * heads, dim)
    )
    scales = [torch.rand(heads if per_head else 1, generator=rng) + 0.5 for _ in range(2)]
    scales[0][0] = 1
    slots = torch.randperm(pages * page_size, generator=rng)[:tokens]
    slots[6] = -1
    before = [scale.clone() for scale in scales]
    rk.store_kv_cache(
        rows[:, :heads], rows[:, heads:], *caches, slots, k_scale=scales[0], v_scale=scales[1]
    )
    assert all(torch.equal(a, b) for a, b in zip(scales, before, strict=True))
    for source, cache, scale in zip(
        (rows[:, :heads], rows[:, heads:]), caches, scales, strict=True
    ):
        expected = torch.full((1,), 0x55, dtype=torch.uint8).view(FP8).double()
        expected = expected.repeat(pages * page_size * heads * dim).view(-1, heads, dim)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = nearest_e4m3(source[token].float() / scale[:, None])
        got = cache.view(torch.uint8).reshape(-1, heads, dim).view(FP8).double()
        assert torch.equal(got.nan_to_num(777), expected.nan_to_num(777))


@needs_fp8
def test_fp8_is_what_attention_reads(rng):
    caches = [torch.zeros(4, 16, 2, 64, dtype=FP8) for _ in range(2)]
    k, v, q = (torch.randn(50, heads, 64, generator=rng).bfloat16() for heads in (2, 2, 4))
    scales = {"k_scale": torch.tensor([0.02, 0.03]), "v_scale": torch.tensor([0.01, 0.04])}
    rk.store_kv_cache(k, v, *caches, torch.arange(50), **scales)
    table = torch.arange(4, dtype=torch.int32)[None]
    lens = torch.tensor([50], dtype=torch.int32)
    ends = torch.tensor([0, 50], dtype=torch.int32)
    got = rk.flash_attn_with_kvcache(q, *caches, table, lens, ends, **scales)
    exact = rk.flash_attn_varlen(q, k, v, ends, ends)
    assert (got.float() - exact.float()).norm() < 0.05 * exact.float().norm()


@needs_fp8
def test_fp8_errors():
    k = torch.ones(2, 3, 16)
    caches = [torch.zeros(2, 4, 3, 16).to(FP8) for _ in range(2)]
    one = torch.ones(1)
    slots = torch.tensor([0, 1])
    for wrong in (
        {},
        {"k_scale": one},
        {"k_scale": one, "v_scale": torch.ones(2)},
        {"k_scale": one[0], "v_scale": one},
    ):
        with pytest.raises(ValueError):
            rk.store_kv_cache(k, k, *caches, slots, **wrong)
    with pytest.raises(TypeError):
        rk.store_kv_cache(k, k, *caches, slots, k_scale=one, v_scale=one.double())
    with pytest.raises(TypeError):
        rk.store_kv_cache(
            k, k, caches[0], torch.zeros(2, 4, 3, 16), slots, k_scale=one, v_scale=one
        )
    with pytest.raises((TypeError, NotImplementedError)):
        e5m2 = [x.to(torch.float8_e5m2) for x in caches]
        rk.store_kv_cache(k, k, *e5m2, slots, k_scale=one, v_scale=one)


def test_device_code_of_gpus(tmp_path):
    assert (
        gpu_objects.run_emulated("kv_cache", tmp_path)
        == "65536 numbers, four ways; copies, three\n"
    )


def test_all_skipped():
    caches = [torch.full((2, 4, 1, 16), math.nan) for _ in range(2)]
    rk.store_kv_cache(torch.ones(3, 1, 16), torch.ones(3, 1, 16), *caches, torch.full((3,), -1))
    assert all(torch.isnan(cache).all() for cache in caches)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("slot_mapping", torch.zeros(2, dtype=torch.int32), TypeError),
        ("slot_mapping", torch.zeros(3, dtype=torch.int64), ValueError),
        pytest.param("slot_mapping", torch.tensor([0, 8]), ValueError, marks=pytest.mark.cpu_only),
        pytest.param("slot_mapping", torch.tensor([0, -2]), ValueError, marks=pytest.mark.cpu_only),
        ("k_cache", torch.zeros(2, 4, 1, 16, dtype=torch.float16), TypeError),
        ("v_cache", torch.zeros(2, 4, 2, 16), ValueError),
        ("v", torch.zeros(2, 1, 32), ValueError),
    ],
)
def test_errors_name_the_argument(name, value, error):
    args = {
        "k": torch.ones(2, 1, 16),
        "v": torch.ones(2, 1, 16),
        "k_cache": torch.zeros(2, 4, 1, 16),
        "v_cache": torch.zeros(2, 4, 1, 16),
        "slot_mapping": torch.tensor([0, 1]),
    } | {name: value}
    with pytest.raises(error):
        rk.store_kv_cache(*args.values())
    if args["k_cache"].dtype == torch.float32:
        assert not args["k_cache"].any(), "an invalid call wrote something"


def test_pages_more_than_2_31_elements_apart(rng):
    caches = [distant((2, 4, 1, 16), torch.bfloat16) for _ in range(2)]
    k, v = (spread((2, 1, 16), torch.bfloat16, rng) for _ in range(2))
    rk.store_kv_cache(k, v, *caches, torch.tensor([7, 1]))
    for source, cache in zip((k, v), caches, strict=True):
        assert_same_bits(cache[1, 3], source[0])
        assert_same_bits(cache[0, 1], source[1])
