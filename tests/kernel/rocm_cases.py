"""A call of each family with its check, for faults that are planted in the code it runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

import radix_kernels as rk
from radix_kernels import reference
from tests.kernel.helpers import FP8, FP8_MAX, assert_same_bits, guarded


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def near(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


def rmsnorm() -> None:
    x = randn(3, 4096)
    w = randn(4096)
    out = guarded((3, 4096), torch.float32)
    rk.rmsnorm(x, w, out=out.view)
    out.check()
    near(out.view, reference.rmsnorm(x.double(), w.double()))


def rope() -> None:
    q = randn(5, 3, 64)
    k = randn(5, 1, 64)
    table = reference.rope_cos_sin_cache(64, 16, 10000.0)
    positions = torch.tensor([3, 0, 15, 7, 1])
    exact = [x.double() for x in (q, k)]
    reference.apply_rope_inplace(positions, *exact, 64, table.double())
    rk.apply_rope_inplace(positions, q, k, 64, table)
    near(q, exact[0])
    near(k, exact[1])


def silu_and_mul() -> None:
    x = randn(3, 512)
    out = guarded((3, 256), torch.float32)
    rk.silu_and_mul(x, out=out.view)
    out.check()
    near(out.view, reference.silu_and_mul(x.double()))


def store_kv_cache() -> None:
    k, v = (randn(5, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    caches = [torch.zeros(4, 4, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.tensor([3, -1, 8, 15, 0])
    rk.store_kv_cache(k, v, *caches, slots)
    for rows, cache in ((k, caches[0]), (v, caches[1])):
        expected = torch.zeros(16, 2, 64, dtype=torch.bfloat16)
        expected[slots[slots >= 0]] = rows[slots >= 0]
        assert_same_bits(cache.view(16, 2, 64), expected)


def per_token_quant() -> None:
    x = randn(13, 2064)
    q, scales = rk.per_token_quant_fp8(x)
    near(scales[:, 0], x.double().abs().amax(-1) / FP8_MAX)
    expected = (x / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8).double()
    assert ((q.double() - expected).abs() <= expected.abs() / 8).all()
    assert (q.double() != expected).float().mean() < 0.01


def topk_softmax() -> None:
    """All experts and within groups, which one kernel does for so many."""
    x = randn(7, 160)
    options = {"num_expert_group": 8, "topk_group": 3, "num_fused_shared_experts": 2}
    for topk, settings in ((4, {"renormalize": True}), (6, options)):
        weights, ids = rk.topk_softmax(x, topk, **settings)
        exact = reference.topk_softmax(x.double(), topk, **settings)
        assert torch.equal(ids.long(), exact[1].long())
        near(weights, exact[0])


def sample() -> None:
    logits = 3 * randn(4, 1000)
    settings = (
        torch.tensor([1.0, 0.7, 1.3, 0.0]),
        torch.tensor([0, 20, 0, 0], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 0.8, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.1]),
        torch.arange(4),
        torch.arange(4) + 9,
    )
    got = rk.top_k_top_p_sampling(logits, *settings)
    assert torch.equal(got, reference.top_k_top_p_sampling(logits.double(), *settings))


def merge_state() -> None:
    outs = [randn(6, 4, 64, dtype=torch.float16), randn(6, 4, 64).half() * 2]
    lses = [randn(6, 4), randn(6, 4) + 1]
    got, lse = rk.merge_state(outs[0], lses[0], outs[1], lses[1])
    exact = reference.merge_state(outs[0].double(), lses[0], outs[1].double(), lses[1])
    near(got, exact[0], 2e-3)
    near(lse, exact[1])


def store_mla_kv() -> None:
    latent = randn(5, 512, dtype=torch.bfloat16)
    rotary = randn(5, 64, dtype=torch.bfloat16)
    cache = torch.zeros(2, 4, 576, dtype=torch.bfloat16)
    slots = torch.tensor([7, 2, -1, 0, 5])
    rk.store_mla_kv(latent, rotary, cache, slots)
    expected = torch.zeros(8, 576, dtype=torch.bfloat16)
    expected[slots[slots >= 0]] = torch.cat([latent, rotary], -1)[slots >= 0]
    assert_same_bits(cache.view(8, 576), expected)


def gather_mla_kv() -> None:
    cache = randn(3, 4, 576, dtype=torch.bfloat16)
    table = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    ends = torch.tensor([0, 5, 7], dtype=torch.int32)
    starts = torch.tensor([1, 2], dtype=torch.int32)
    out = torch.zeros(7, 576, dtype=torch.bfloat16)
    rk.gather_mla_kv(cache, table, ends, out, starts=starts)
    assert_same_bits(out, torch.cat([cache[2, 1:], cache[0, :2], cache[1, 2:]]))


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        rmsnorm,
        rope,
        silu_and_mul,
        store_kv_cache,
        per_token_quant,
        topk_softmax,
        sample,
        merge_state,
        store_mla_kv,
        gather_mla_kv,
    )
}
