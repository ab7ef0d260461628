from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import FLOATS, assert_same_bits, distant, spread


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
    pages, heads, dim = 40, 3, 48
    for k_cache, v_cache in layouts(pages, page_size, heads, dim, dtype):
        qkv = spread((tokens, 2 * heads + 4, dim), dtype, rng)
        k, v = qkv[:, 1 : 1 + heads], qkv[:, heads + 2 : 2 * heads + 2]
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
    pages, page_size, heads, tokens = 6, 5, 3, 17
    shape = (pages, heads, page_size) if hnd else (pages, page_size, heads)
    caches = [torch.full((*shape, dim), 77, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full(shape, -1.0) for _ in range(2)]
    if hnd:
        caches, scales = ([x.transpose(1, 2) for x in xs] for xs in (caches, scales))
    rows = spread((tokens, 2 * heads, dim), dtype, rng)
    rows[2, 1] = 0
    slots = torch.randperm(pages * page_size, generator=rng)[:tokens]
    slots[4] = -1
    rk.store_kv_cache(rows[:, :heads], rows[:, heads:], *caches, slots, k_scale=scales[0], v_scale=scales[1])
    for source, cache, scale in zip((rows[:, :heads], rows[:, heads:]), caches, scales, strict=True):
        values, factors = torch.full((pages * page_size, heads, dim), 77), torch.full((pages * page_size, heads), -1.0)
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
    scale, slots = torch.zeros(2, 4, 1), torch.tensor([0, 1])
    for wrong in ({}, {"k_scale": scale}, {"k_scale": scale, "v_scale": torch.zeros(2, 4)}):
        with pytest.raises(ValueError):
            rk.store_kv_cache(k, k, *caches, slots, **wrong)
    with pytest.raises(TypeError):
        rk.store_kv_cache(k, k, *caches, slots, k_scale=scale, v_scale=scale.double())
    with pytest.raises(ValueError):
        rk.store_kv_cache(k, k, torch.zeros(2, 4, 1, 16), torch.zeros(2, 4, 1, 16), slots, k_scale=scale, v_scale=scale)
    with pytest.raises(TypeError):
        rk.store_kv_cache(k, k, caches[0], torch.zeros(2, 4, 1, 16), slots, k_scale=scale, v_scale=scale)


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
