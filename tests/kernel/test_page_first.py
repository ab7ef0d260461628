"""Caches as a layer sees them in a pool whose pages hold all layers: [pages, layers, ...] with one
layer taken out. The bits of the same call over a cache of its own, and nothing else touched; on a
GPU also in a pool of more than 64 GiB."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import radix_kernels as rk
from tests.kernel import mla_cases
from tests.kernel.attention_cases import Case, make_case, quantized
from tests.kernel.helpers import spread

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
LAYERS = 3
LAYER = 1

# Of a pool that 32 bits of 16 bytes do not reach.
PAGE_BYTES = 2 << 20
FAR_PAGES = 35_000


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """NaN, or bytes that are NaN in FP8."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.full(shape, math.nan, dtype=dtype)
    return torch.full(shape, 127, dtype=torch.uint8).view(dtype)


class LayerViews:
    """One layer's views of a poisoned page-first tensor, with the contents of `caches`, which share
    a shape and a dtype."""

    def __init__(self, caches: list[torch.Tensor]) -> None:
        pages, *page = caches[0].shape
        self.pool = poisoned((pages, LAYERS, len(caches), *page), caches[0].dtype)
        self.views = [self.pool[:, LAYER, part] for part in range(len(caches))]
        for view, cache in zip(self.views, caches, strict=True):
            view.copy_(cache)

    def assert_others_untouched(self) -> None:
        fresh = poisoned(tuple(self.pool.shape), self.pool.dtype)
        for layer in range(LAYERS):
            if layer != LAYER:
                same(self.pool[:, layer], fresh[:, layer])


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """The bits, of NaN too."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def in_layer(case: Case) -> LayerViews:
    """Moves the case's caches to a page-first tensor."""
    layer = LayerViews([case.k_cache, case.v_cache])
    case.k_cache, case.v_cache = layer.views
    return layer


def fp8(case: Case, *, queries: bool) -> dict[str, torch.Tensor]:
    """Makes the cache FP8, on demand the queries too; the scales."""
    case.k_cache = case.k_cache.to(FP8)
    case.v_cache = case.v_cache.to(FP8)
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
    if queries:
        case.q = case.q.to(FP8)
        scales["q_scale"] = torch.tensor([0.75])
    return scales


DECODE = [(1, 600), (1, 33), (1, 1), (1, 0)]
PREFILL = [(40, 60), (150, 200), (0, 9)]


@pytest.mark.parametrize("rows", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "fp8"])
def test_attention(rows, page_size, kind, rng):
    dtype = torch.float32 if kind == "float32" else BF16
    case = make_case(rows, rng, dim=64, page_size=page_size, dtype=dtype)
    options: dict[str, Any] = {"max_seqlen_q": max(n for n, _ in rows)}
    if kind == "fp8":
        options |= fp8(case, queries=rows is PREFILL)
    expected = rk.flash_attn_with_kvcache(*case.args, **options)
    in_layer(case)
    same(rk.flash_attn_with_kvcache(*case.args, **options), expected)


@pytest.mark.cpu_only
@pytest.mark.parametrize("page_size", [1, 16])
def test_attention_over_int8(page_size, rng):
    case, scales = quantized(make_case([(1, 90), (20, 50)], rng, page_size=page_size))
    expected = rk.flash_attn_with_kvcache(*case.args, **scales)
    in_layer(case)
    k_scale, v_scale = LayerViews([scales["k_scale"], scales["v_scale"]]).views
    same(rk.flash_attn_with_kvcache(*case.args, k_scale=k_scale, v_scale=v_scale), expected)


@pytest.mark.parametrize("rows", [[(1, 20)], [(3, 20)]], ids=["decode", "prefill"])
def test_triton_attention(rows, rng):
    pytest.importorskip("triton")
    case = make_case(rows, rng, dim=16, page_size=4, dtype=torch.float16)
    expected = rk.flash_attn_with_kvcache(*case.args, implementation="triton")
    in_layer(case)
    same(rk.flash_attn_with_kvcache(*case.args, implementation="triton"), expected)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_mla_decode(heads, page_size, small, batch_invariant, rng):
    case = mla_cases.make_case(
        [(1, 150), (2, 31)], rng, heads=heads, page_size=page_size, fp8=small
    )
    options = {
        "softmax_scale": mla_cases.SCALE,
        "max_seqlen_q": 2,
        "batch_invariant": batch_invariant,
    }
    expected = rk.mla_decode(*case.args, **options)
    nope, rope, cache, *rest = case.args
    (view,) = LayerViews([cache]).views
    same(rk.mla_decode(nope, rope, view, *rest, **options), expected)


def latents(rng: torch.Generator, count: int, *, small: bool) -> torch.Tensor:
    """[pages, 4, 576], or the FP8 form of it."""
    cache = spread((count, 4, 576), BF16, rng)
    return rk.reference.pack_mla_tokens(cache[..., :512], cache[..., 512:]) if small else cache


@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "fp8"])
def test_gather_mla_kv(small, rng):
    cache = latents(rng, 3, small=small)
    table, ends = (torch.tensor(x, dtype=torch.int32) for x in ([[2, 0]], [0, 7]))
    expected = rk.gather_mla_kv(cache, table, ends, torch.empty(7, 576, dtype=BF16))
    (view,) = LayerViews([cache]).views
    same(rk.gather_mla_kv(view, table, ends, torch.empty(7, 576, dtype=BF16)), expected)


@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "fp8"])
def test_store_mla_kv(small, rng):
    latent, rope = (spread((5, n), BF16, rng) for n in (512, 64))
    cache = latents(rng, 3, small=small)
    layer = LayerViews([cache])
    slots = torch.tensor([11, 0, 6, -1, 10])
    rk.store_mla_kv(latent, rope, cache, slots)
    rk.store_mla_kv(latent, rope, layer.views[0], slots)
    same(layer.views[0], cache)
    layer.assert_others_untouched()


def caches_and_layer(
    dtype: torch.dtype, dim: int = 64
) -> tuple[list[torch.Tensor], LayerViews, torch.Tensor]:
    """K and V of their own, the same in a page-first tensor, and slots of 5 tokens."""
    caches = [poisoned((3, 4, 2, dim), dtype) for _ in range(2)]
    return caches, LayerViews(caches), torch.tensor([11, 0, 6, -1, 10])


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_store_kv_cache(dtype, rng):
    caches, layer, slots = caches_and_layer(dtype)
    k, v = (spread((5, 2, 64), dtype, rng) for _ in range(2))
    rk.store_kv_cache(k, v, *caches, slots)
    rk.store_kv_cache(k, v, *layer.views, slots)
    for view, cache in zip(layer.views, caches, strict=True):
        same(view, cache)
    layer.assert_others_untouched()


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_fused_qk_norm_rope_store(dtype, rng):
    caches, layer, slots = caches_and_layer(dtype)
    q, k, v = (spread((5, heads, 64), dtype, rng) for heads in (6, 2, 2))
    weights = [spread((64,), dtype, rng) for _ in range(2)]
    table = rk.rope_cos_sin_cache(64, 30, 1e4)
    queries = [q.clone(), q.clone()]
    for x, into in zip(queries, (caches, layer.views), strict=True):
        rk.fused_qk_norm_rope_store(x, k, v, *weights, table, torch.arange(5), *into, slots)
    same(queries[1], queries[0])
    for view, cache in zip(layer.views, caches, strict=True):
        same(view, cache)
    layer.assert_others_untouched()


class FarPool:
    """Pages of 2 MiB in one allocation of 68 GiB. A layer's view begins at `offset` of a page."""

    def __init__(self) -> None:
        self._memory = torch.empty(FAR_PAGES * PAGE_BYTES, dtype=torch.uint8, device="cuda")
        self._memory.fill_(0xFF)  # NaN in bfloat16, float32 and e4m3fn

    def view(self, page: torch.Size, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """[FAR_PAGES, *page]."""
        memory = self._memory.view(dtype)
        inner = [math.prod(page[i + 1 :]) for i in range(len(page))]
        strides = (PAGE_BYTES // dtype.itemsize, *inner)
        return memory.as_strided((FAR_PAGES, *page), strides, offset // dtype.itemsize)

    def moved(self, cache: torch.Tensor, ids: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """The view with page i of `cache` at page ids[i], poison in its other tokens."""
        view = self.view(cache.shape[1:], cache.dtype, offset)
        for page, at in zip(cache, ids.tolist(), strict=True):
            view[at].copy_(page)
        return view


def far_ids(table: torch.Tensor, used: int, count: int, rng: torch.Generator) -> torch.Tensor:
    """New ids of `count` pages, put into the one row of `table`; the last page it uses is the
    pool's last."""
    pages = table[0, :used].long()
    ids = torch.randperm(FAR_PAGES - 1, generator=rng)[:count]
    ids[pages[-1]] = FAR_PAGES - 1
    table[0, :used] = ids[pages].to(torch.int32)
    return ids


@pytest.fixture
def far_pool(request) -> Iterator[FarPool]:
    if request.config.getoption("--device") != "cuda":
        pytest.skip("wants 68 GiB of a GPU")
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < FAR_PAGES * PAGE_BYTES + (2 << 30):
        pytest.skip("wants 68 GiB of a GPU")
    yield FarPool()
    torch.cuda.empty_cache()


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.cuda() for x in tensors]


# Decode; prefill by TMA, in one block and in pairs; gathered prefill.
FAR = [
    (2, 600, 16),
    (2, 90, 1),
    (1, 700, 64),
    (40, 60, 16),
    (150, 200, 16),
    (40, 60, 4),
    (40, 9, 1),
]


@pytest.mark.parametrize(("queries", "kv_len", "page_size"), FAR)
@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("implementation", [None, "triton"])
def test_attention_beyond_64_gib(queries, kv_len, page_size, small, implementation, rng, far_pool):
    case = make_case(
        [(queries, kv_len)], rng, heads=(4, 2), dim=128, page_size=page_size, dtype=BF16
    )
    options: dict[str, Any] = {"max_seqlen_q": queries, "causal": queries <= kv_len}
    if implementation:
        options["implementation"] = implementation
    if small:
        options |= fp8(case, queries=queries > 16)
    expected = rk.flash_attn_with_kvcache(*case.args, **options)
    ids = far_ids(case.page_table, -(-kv_len // page_size), len(case.k_cache), rng)
    k = far_pool.moved(case.k_cache, ids)
    v = far_pool.moved(case.v_cache, ids, offset=PAGE_BYTES // 2)
    q, table, *rest = on_gpu(case.q, case.page_table, case.kv_lens, case.cu_seqlens_q)
    scales = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    same(rk.flash_attn_with_kvcache(q, k, v, table, *rest, **scales).cpu(), expected)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_mla_beyond_64_gib(heads, page_size, small, batch_invariant, rng, far_pool):
    case = mla_cases.make_case([(1, 150)], rng, heads=heads, page_size=page_size, fp8=small)
    nope, rope, cache, table, lens, starts = case.args
    options = {"softmax_scale": mla_cases.SCALE, "batch_invariant": batch_invariant}
    ends = torch.tensor([0, 150], dtype=torch.int32)
    rows = torch.empty(150, 576, dtype=BF16)
    expected = rk.mla_decode(*case.args, max_seqlen_q=1, **options)
    gathered = rk.gather_mla_kv(cache, table, ends, rows)
    ids = far_ids(table, -(-150 // page_size), len(cache), rng)
    view = far_pool.moved(cache, ids)
    nope, rope, table, lens, starts, ends = on_gpu(nope, rope, table, lens, starts, ends)
    got = rk.mla_decode(nope, rope, view, table, lens, starts, max_seqlen_q=1, **options)
    same(got.cpu(), expected)
    same(rk.gather_mla_kv(view, table, ends, torch.empty_like(rows).cuda()).cpu(), gathered)


@pytest.mark.parametrize("fused", [False, True])
def test_stores_beyond_64_gib(fused, rng, far_pool):
    page = torch.Size((4, 2, 64))
    caches = [far_pool.view(page, BF16, offset) for offset in (0, PAGE_BYTES // 2)]
    slots = torch.tensor([4 * FAR_PAGES - 1, 0, -1, 4 * (FAR_PAGES - 100) + 2])
    q, k, v = (spread((4, heads, 64), BF16, rng) for heads in (6, 2, 2))
    small = [poisoned((1, 4, 2, 64), BF16) for _ in range(2)]
    near = torch.tensor([3, 0, -1, 2])
    table = rk.rope_cos_sin_cache(64, 30, 1e4)
    at = torch.arange(4)
    if fused:
        rk.fused_qk_norm_rope_store(q.clone(), k, v, None, None, table, at, *small, near)
        there = on_gpu(q, k, v)
        cos_sin, positions, far_slots = on_gpu(table, at, slots)
        rk.fused_qk_norm_rope_store(*there, None, None, cos_sin, positions, *caches, far_slots)
    else:
        rk.store_kv_cache(k, v, *small, near)
        rk.store_kv_cache(*on_gpu(k, v), *caches, slots.cuda())
    for view, cache in zip(caches, small, strict=True):
        for slot, expected in zip(slots.tolist(), near.tolist(), strict=True):
            if slot >= 0:
                same(view[slot // 4, slot % 4].cpu(), cache[0, expected])


@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "fp8"])
def test_latents_stored_beyond_64_gib(small, rng, far_pool):
    latent, rope = (spread((2, n), BF16, rng) for n in (512, 64))
    cache = latents(rng, 1, small=small)
    rk.store_mla_kv(latent, rope, cache, torch.tensor([3, 1]))
    view = far_pool.view(cache.shape[1:], cache.dtype)
    rk.store_mla_kv(*on_gpu(latent, rope), view, torch.tensor([4 * FAR_PAGES - 1, 1]).cuda())
    same(view[FAR_PAGES - 1, 3].cpu(), cache[0, 3])
    same(view[0, 1].cpu(), cache[0, 1])
