"""Rows, tokens and pages more than 2**31 elements apart: the bits of the same call with everything
close together."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import radix_kernels as rk
from tests.kernel import experts_cases
from tests.kernel.attention_cases import Case, make_case, varlen_args
from tests.kernel.helpers import assert_close, assert_same_bits, distant, spread

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _give_memory_back(request) -> Iterator[None]:
    """On a GPU what lies between is allocated."""
    yield
    if request.config.getoption("--device") != "cpu":
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _native(monkeypatch) -> None:
    monkeypatch.setattr("radix_kernels._choices.triton_experts_are_faster", lambda *_: False)


def far(x: torch.Tensor) -> torch.Tensor:
    return distant(x.shape, x.dtype).copy_(x)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    if got.element_size() == 1:
        assert torch.equal(
            got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
        )
    else:
        assert_same_bits(got, expected)


def in_order(case: Case, page_size: int) -> None:
    """The one row's pages, one after the other, and no others: the last is used."""
    used = case.page_table[0, : -(-int(case.kv_lens[0]) // page_size)].long()
    case.k_cache = case.k_cache[used]
    case.v_cache = case.v_cache[used]
    case.page_table[0, : len(used)] = torch.arange(len(used))


def narrow(case: Case, fp8: str) -> dict[str, torch.Tensor]:
    """Makes the cache FP8, or with "all" the queries too, and returns the scales."""
    if not fp8:
        return {}
    case.k_cache = case.k_cache.to(FP8)
    case.v_cache = case.v_cache.to(FP8)
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
    if fp8 == "all":
        case.q = case.q.to(FP8)
        scales["q_scale"] = torch.tensor([0.75])
    return scales


# Decode; prefill by TMA, in one block and in pairs; gathered prefill.
PAGED = [(2, 600, 16), (2, 90, 1), (40, 60, 16), (150, 200, 16), (40, 60, 4)]


@pytest.mark.parametrize(("queries", "kv_len", "page_size"), PAGED)
@pytest.mark.parametrize("fp8", [False, True])
def test_paged_attention(queries, kv_len, page_size, fp8, rng):
    case = make_case(
        [(queries, kv_len)], rng, heads=(4, 2), dim=128, page_size=page_size, dtype=BF16
    )
    in_order(case, page_size)
    kind = ""
    if fp8:
        kind = "all" if queries > 16 else "cache"
    options = {"max_seqlen_q": queries, **narrow(case, kind)}
    expected = rk.flash_attn_with_kvcache(*case.args, **options)
    case.q = far(case.q)
    case.k_cache = far(case.k_cache)
    case.v_cache = far(case.v_cache)
    out = distant(expected.shape, expected.dtype)
    same(rk.flash_attn_with_kvcache(*case.args, **options, out=out), expected)


@pytest.mark.parametrize("fp8", [False, True])
def test_varlen_attention(fp8, rng):
    case = make_case([(150, 200)], rng, heads=(4, 2), dim=128, dtype=BF16)
    q, k, v, *starts = varlen_args(case)
    options = {"max_seqlen_q": 150}
    if fp8:
        q, k, v = (x.to(FP8) for x in (q, k, v))
        options |= {name: torch.tensor([0.5]) for name in ("q_scale", "k_scale", "v_scale")}
    expected = rk.flash_attn_varlen(q, k, v, *starts, **options)
    out = distant(expected.shape, expected.dtype)
    same(rk.flash_attn_varlen(far(q), far(k), far(v), *starts, **options, out=out), expected)


def test_tokens_of_a_page_32_gib_apart(rng, request):
    """Gathered: the third token is where 32 bits of 16 bytes begin again. The one page steps
    nowhere."""
    if request.config.getoption("--device") != "cuda" or torch.cuda.mem_get_info()[0] < 66 << 30:
        pytest.skip("wants 66 GiB of a GPU")
    case = make_case([(40, 3)], rng, heads=(2, 1), dim=64, page_size=3, dtype=BF16)
    in_order(case, 3)
    expected = rk.flash_attn_with_kvcache(*case.args, causal=False, max_seqlen_q=40)
    step = 1 << 34
    pool = torch.empty(2 * step + 128, dtype=BF16, device="cuda")
    k, v = (pool.as_strided((1, 3, 1, 64), (64, step, 64, 1), i * 64) for i in range(2))
    k.copy_(case.k_cache)
    v.copy_(case.v_cache)
    q, *rest = (x.cuda() for x in (case.q, case.page_table, case.kv_lens, case.cu_seqlens_q))
    got = rk.flash_attn_with_kvcache(q, k, v, *rest, causal=False, max_seqlen_q=40)
    same(got.cpu(), expected)


def test_merge_state(rng):
    a, b = (spread((5, 3, 64), BF16, rng) for _ in range(2))
    lses = [torch.randn(5, 3, generator=rng) for _ in range(2)]
    expected, expected_lse = rk.merge_state(a, lses[0], b, lses[1])
    got, lse = rk.merge_state(far(a), lses[0], far(b), lses[1], out=distant(a.shape, BF16))
    same(got, expected)
    same(lse, expected_lse)


@pytest.mark.parametrize(("heads", "page_size"), [(16, 16), (64, 16), (40, 7)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_mla_decode(heads, page_size, fp8, batch_invariant, rng):
    """Hopper's kernels for few heads and for many, and the one whose bits do not depend on the
    batch."""
    nope, rope = (spread((2, heads, n), BF16, rng) for n in (512, 64))
    pages = -(-90 // page_size)
    cache = spread((pages, page_size, 576), BF16, rng)
    if fp8:
        cache = rk.reference.pack_mla_tokens(cache[..., :512], cache[..., 512:])
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([list(range(pages))], [90], [0, 2])]
    options = {"softmax_scale": 192**-0.5, "max_seqlen_q": 2, "batch_invariant": batch_invariant}
    expected = rk.mla_decode(nope, rope, cache, *ints, **options)
    out = distant(nope.shape, BF16)
    same(rk.mla_decode(far(nope), far(rope), far(cache), *ints, **options, out=out), expected)


@pytest.mark.parametrize("fp8", [False, True])
def test_store_mla_kv(fp8, rng):
    latent = spread((5, 512), BF16, rng)
    rope = spread((5, 64), BF16, rng)
    cache = torch.zeros(3, 4, 656, dtype=torch.uint8) if fp8 else torch.zeros(3, 4, 576, dtype=BF16)
    pages = far(cache)
    slots = torch.tensor([11, 0, 6, -1, 10])
    rk.store_mla_kv(latent, rope, cache, slots)
    rk.store_mla_kv(far(latent), far(rope), pages, slots)
    same(pages, cache)
    assert cache[2, 3].any()


@pytest.mark.parametrize("fp8", [False, True])
def test_gather_mla_kv(fp8, rng):
    cache = spread((3, 4, 576), BF16, rng)
    if fp8:
        cache = rk.reference.pack_mla_tokens(cache[..., :512], cache[..., 512:])
    table, ends = (torch.tensor(x, dtype=torch.int32) for x in ([[2, 0]], [0, 7]))
    expected = rk.gather_mla_kv(cache, table, ends, torch.empty(7, 576, dtype=BF16))
    same(rk.gather_mla_kv(far(cache), table, ends, distant((7, 576), BF16)), expected)


def test_store_kv_cache(rng):
    k, v = (spread((3, 1, 16), BF16, rng) for _ in range(2))
    caches = [torch.zeros(2, 4, 1, 16, dtype=BF16) for _ in range(2)]
    pages = [far(cache) for cache in caches]
    slots = torch.tensor([7, -1, 1])
    rk.store_kv_cache(k, v, *caches, slots)
    rk.store_kv_cache(far(k), far(v), *pages, slots)
    for there, cache in zip(pages, caches, strict=True):
        same(there, cache)


@pytest.mark.parametrize("rope", [64, 6])
def test_concat_mla_k(rope, rng):
    nope = spread((3, 2, 128), BF16, rng)
    part = spread((3, 1, rope), BF16, rng)
    k = distant((3, 2, 128 + rope), BF16)
    rk.concat_mla_k(k, far(nope), far(part))
    same(k, torch.cat((nope, part.expand(-1, 2, -1)), -1))


# A kernel for few tokens, wide tiles, tiles of 256 tokens.
@pytest.mark.parametrize("tokens", [2, 70, 1100])
@pytest.mark.parametrize("kind", ["rows", "fast", "blocks"])
def test_fp8_products(tokens, kind, rng):
    a, b = (torch.randn(n, 256, generator=rng).to(FP8) for n in (tokens, 256))
    if kind == "blocks":
        op = rk.fp8_blockwise_scaled_mm
        scales = (torch.rand(tokens, 2), torch.rand(2, 2).t())
        options = {}
    else:
        op = rk.fp8_scaled_mm
        scales = (torch.rand(tokens, 1), torch.rand(1, 256))
        options = {"fast_accum": kind == "fast"}
    expected = op(a, b.t(), *scales, **options)
    same(op(far(a), far(b).t(), *scales, **options, out=distant(expected.shape, BF16)), expected)


@pytest.mark.parametrize("tokens", [2, 70, 300])
def test_int8_products(tokens, rng):
    a, b = (torch.randint(-128, 128, (n, 256), generator=rng).to(torch.int8) for n in (tokens, 256))
    scales = (torch.rand(tokens, 1), torch.rand(1, 256))
    options = {"azp": torch.full((1,), 3, dtype=torch.int32), "b_sums": b.sum(1).int()}
    expected = rk.int8_scaled_mm(a, b.t(), *scales, **options)
    out = distant(expected.shape, BF16)
    same(rk.int8_scaled_mm(far(a), far(b).t(), *scales, **options, out=out), expected)


@pytest.mark.parametrize("tokens", [3, 70])
def test_bmm_fp8(tokens, rng):
    a, b = (torch.randn(2, n, 128, generator=rng).to(FP8) for n in (tokens, 144))
    one = torch.ones(1)
    same(rk.bmm_fp8(far(a), far(b).mT, one, one), rk.bmm_fp8(a, b.mT, one, one))


@pytest.mark.parametrize("tokens", [3, 40, 70])
def test_linear_with_a_residual(tokens, rng):
    x, w, residual = (spread(shape, BF16, rng) for shape in ((tokens, 64), (48, 64), (tokens, 48)))
    expected = rk.linear(x, w, residual=residual)
    same(
        rk.linear(far(x), far(w), residual=far(residual), out=distant(expected.shape, BF16)),
        expected,
    )


@pytest.mark.parametrize("group", [None, 128])
def test_quantize(group, rng):
    x = spread((3, 512), BF16, rng)
    w = spread((512,), BF16, rng)
    ops = {
        rk.per_token_quant_fp8: {},
        rk.silu_and_mul_quant_fp8: {"group_size": group},
        rk.rmsnorm_quant_fp8: {"weight": w, "group_size": group},
    }
    if group is not None:
        del ops[rk.per_token_quant_fp8]
        ops[rk.per_token_group_quant] = {"group_size": group}
    for op, options in ops.items():
        values, scales = op(x, **options)
        got, got_scales = op(far(x), **options, out=distant(values.shape, FP8))
        same(got, values)
        same(got_scales, scales)


def test_quantize_to_int8(rng):
    x = spread((3, 512), BF16, rng)
    w = spread((512,), BF16, rng)
    for op, more in (
        (rk.per_token_quant_int8, ()),
        (rk.silu_and_mul_quant_int8, ()),
        (rk.rmsnorm_quant_int8, (w,)),
    ):
        codes, scales = op(x, *more)
        got, got_scales = op(far(x), *more, out=distant(codes.shape, torch.int8))
        assert torch.equal(got, codes)
        same(got_scales, scales)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rows", [40, 200])
def test_grouped_products(fp8, rows, rng):
    x = torch.randn(2 * 256, 128, generator=rng)
    weight = torch.randn(2, 136, 128, generator=rng)
    scales = {}
    if fp8:
        x = x.to(FP8)
        weight = weight.to(FP8)
        scales = {"x_scale": torch.rand(512, 1), "weight_scale": torch.rand(2, 2, 1)}
    else:
        x = x.to(BF16)
        weight = weight.to(BF16)
    groups = torch.full((512,), -1, dtype=torch.int32)
    groups[:rows] = 0
    groups[256 : 256 + rows] = 1
    expected = rk.m_grouped_gemm_contiguous(x, weight, groups, **scales)
    out = distant(expected.shape, BF16)
    rk.m_grouped_gemm_contiguous(far(x), weight, groups, **scales, out=out)
    same(out[groups >= 0], expected[groups >= 0])
    counts = torch.tensor([rows, 256], dtype=torch.int32)
    if fp8:
        scales["x_scale"] = scales["x_scale"].unflatten(0, (2, 256))
    expected = rk.m_grouped_gemm_masked(x.unflatten(0, (2, 256)), weight, counts, **scales)
    out = distant((512, 136), BF16).unflatten(0, (2, 256))
    rk.m_grouped_gemm_masked(far(x).unflatten(0, (2, 256)), weight, counts, **scales, out=out)
    for group, count in enumerate(counts.tolist()):
        same(out[group, :count], expected[group, :count])


@pytest.mark.parametrize("tokens", [3, 40, 300])
@pytest.mark.parametrize("scales", ["", "tensor", "block"])
def test_fused_experts(tokens, scales, rng):
    case = experts_cases.make(tokens, 3, 2, 128, 128, BF16, rng, scales=scales)
    for quantized in {False, scales == "block"}:
        options = {**case.options, "use_fp8_w8a8": quantized}
        args = (case.w1, case.w2, case.weights, case.ids)
        expected = rk.fused_experts(case.x, *args, **options)
        same(
            rk.fused_experts(far(case.x), *args, **options, out=distant(expected.shape, BF16)),
            expected,
        )


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("scales", ["tensor", "block"])
def test_experts_whose_weights_are_more_than_2_31_elements(tokens, scales, rng, request):
    if request.config.getoption("--device") != "cuda":
        pytest.skip("wants 3 GiB of weights")
    case = experts_cases.make(tokens, 2, 2, 4096, 2048, BF16, rng, scales=scales)
    count = 131
    options = dict(case.options)
    weights = []
    for w, name in ((case.w1, "w1_scale"), (case.w2, "w2_scale")):
        large = torch.empty((count, *w.shape[1:]), dtype=FP8, device="cuda")
        large[0] = w[0].cuda()
        large[-1] = w[1].cuda()
        weights.append(large)
        scale = torch.full((count, *options[name].shape[1:]), math.nan)  # nobody names the others
        scale[0], scale[-1] = options[name]
        options[name] = scale.cuda()
    assert weights[0].numel() > 2**31
    x = case.x.cuda()
    gates = case.weights.cuda()
    expected = rk.fused_experts(case.x, case.w1, case.w2, case.weights, case.ids, **case.options)
    got = rk.fused_experts(x, *weights, gates, (case.ids * (count - 1)).cuda(), **options)
    assert_close("fused_experts", got.cpu(), expected.double(), (1.6e-2, 1e-1))
