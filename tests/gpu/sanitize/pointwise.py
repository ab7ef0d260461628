"""Norms, activations, RoPE, routing, and what is stored or merged."""

from __future__ import annotations

import torch

import radix_kernels as rk
from tests.gpu.sanitize.compare import FP8, HALF, compare, on_gpu
from tests.kernel.step_cases import random_samples, random_step


def stores() -> None:
    """Latent tokens in words of 16 bytes and of 2, and in FP8; keys and values; full keys; two
    partial attentions."""
    rng = torch.Generator().manual_seed(0)
    slots = torch.randperm(80, generator=rng)[:70]
    slots[3] = -1
    for latent, rope, width in ((512, 64, 576), (24, 10, 34), (512, 64, 656)):
        store_latent(latent, rope, width, slots, rng)
    for nope, rope in ((128, 64), (20, 6)):
        join_keys(nope, rope, rng)
    for dim in (128, 20):  # pieces of 16 bytes and single elements, copied and quantized
        for dtype in (HALF, FP8):
            store_pages(dim, dtype, slots, rng)
    for dtype in (HALF, torch.float16, torch.float32):
        for dim in (128, 20):
            merge(dim, dtype, rng)


def half(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Normal numbers in bfloat16."""
    return torch.randn(shape, generator=rng).to(HALF)


def store_latent(
    latent: int, rope: int, width: int, slots: torch.Tensor, rng: torch.Generator
) -> None:
    """width: elements of a stored token; 656 bytes in FP8."""
    tokens = half(rng, 70, latent)
    ropes = half(rng, 70, rope)
    cache = torch.zeros(5, 16, width, dtype=torch.uint8 if width == 656 else HALF)
    there = cache.cuda()
    rk.store_mla_kv(tokens.cuda(), ropes.cuda(), there, slots.cuda())
    rk.reference.store_mla_kv(tokens, ropes, cache, slots)
    compare(f"store_mla_kv, {latent} and {rope}, {cache.dtype}", there, cache, 0)


def join_keys(nope: int, rope: int, rng: torch.Generator) -> None:
    """concat_mla_k of 70 tokens and 5 heads."""
    there = torch.zeros(70, 5, nope + rope, dtype=HALF).cuda()
    k_nope = half(rng, 70, 5, nope)
    k_rope = half(rng, 70, 1, rope)
    rk.concat_mla_k(there, k_nope.cuda(), k_rope.cuda())
    expected = torch.cat((k_nope, k_rope.expand(-1, 5, -1)), -1)
    compare(f"concat_mla_k, {nope} and {rope}", there, expected, 0)


def store_pages(dim: int, dtype: torch.dtype, slots: torch.Tensor, rng: torch.Generator) -> None:
    """store_kv_cache of 70 tokens and 5 heads; in FP8 with a scale a head."""
    k = half(rng, 70, 5, dim)
    v = half(rng, 70, 5, dim)
    scales = {}
    if dtype == FP8:
        scales = {name: torch.rand(5, generator=rng) + 0.5 for name in ("k_scale", "v_scale")}
    scales_there = {name: x.cuda() for name, x in scales.items()}
    k_cache = torch.zeros(5, 16, 5, dim).to(dtype)
    v_cache = torch.zeros(5, 16, 5, dim).to(dtype)
    k_there = k_cache.cuda()
    v_there = v_cache.cuda()
    rk.store_kv_cache(k.cuda(), v.cuda(), k_there, v_there, slots.cuda(), **scales_there)
    rk.reference.store_kv_cache(k, v, k_cache, v_cache, slots, **scales)
    for got, expected in ((k_there, k_cache), (v_there, v_cache)):
        compare(f"store_kv_cache of {dim}, {dtype}", got.float(), expected.float(), 0)


def merge(dim: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Into new tensors, and in place of the first side."""
    a, b = (torch.randn(70, 5, dim, generator=rng).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(70, 5, generator=rng) for _ in range(2))
    lse_a[3] = -torch.inf
    args = (a, lse_a, b, lse_b)
    expected = rk.reference.merge_state(*args)
    there = [x.cuda() for x in args]
    got = rk.merge_state(*there)
    in_place = rk.merge_state(*there, out=there[0], lse=there[1])
    for out, lse in (got, in_place):
        compare(f"merge_state of {dim}, {dtype}", out, expected[0], 5e-3)
        compare(f"lse of merge_state of {dim}, {dtype}", lse, expected[1], 1e-5)


def pointwise() -> None:
    """Norms, the gated activation and RoPE; few rows and many, narrow and wide."""
    rng = torch.Generator().manual_seed(0)
    for tokens, size in ((1, 1024), (70, 1024), (9, 8192)):
        x = half(rng, tokens, size)
        residual = half(rng, tokens, size)
        weight = half(rng, size)
        expected = rk.reference.rmsnorm(x, weight)
        got = rk.rmsnorm(x.cuda(), weight.cuda())
        compare(f"rmsnorm, {tokens} x {size}", got, expected, 5e-3)
        got = rk.silu_and_mul(x.cuda())
        compare(f"silu_and_mul, {tokens} x {size}", got, rk.reference.silu_and_mul(x), 5e-3)
        made = rk.rmsnorm_quant_fp8(x.cuda(), weight.cuda())
        compare(f"rmsnorm_quant_fp8, {tokens} x {size}", widened(*made), expected, 5e-2)
        values, scales = rk.rmsnorm_quant_int8(x.cuda(), weight.cuda())
        compare(f"rmsnorm_quant_int8, {tokens} x {size}", values * scales, expected, 2e-2)
        values, scales = rk.silu_and_mul_quant_int8(x.cuda())
        expected = rk.reference.silu_and_mul(x)
        compare(f"silu_and_mul_quant_int8, {tokens} x {size}", values * scales, expected, 4e-2)
        values, scales = rk.per_token_quant_int8(x.cuda())
        compare(f"per_token_quant_int8, {tokens} x {size}", values * scales, x, 2e-2)
        there = x.cuda(), residual.cuda()
        rk.fused_add_rmsnorm(*there, weight.cuda())
        rk.reference.fused_add_rmsnorm(x, residual, weight)
        compare(f"fused_add_rmsnorm, {tokens} x {size}", there[0], x, 5e-3)
    table = rk.rope_cos_sin_cache(128, 64, 1e4)
    for heads, kv_heads, tokens in ((4, 2, 1), (32, 8, 70)):
        q = half(rng, tokens, heads, 128)
        k = half(rng, tokens, kv_heads, 128)
        positions = torch.arange(tokens) % 64
        there = q.cuda(), k.cuda()
        rk.apply_rope_inplace(positions.cuda(), *there, 128, table.cuda())
        rk.reference.apply_rope_inplace(positions, q, k, 128, table)
        compare(f"apply_rope_inplace, {tokens} tokens of {heads} heads", there[0], q, 5e-3)


def quantization() -> None:
    """Norms with a residual and activations that quantize what they write, and plain quantization:
    a scale a row, for each 128 elements, and one of all."""
    rng = torch.Generator().manual_seed(0)
    for tokens, size in ((1, 1024), (70, 1024), (9, 8192), (3, 20480)):
        x = half(rng, tokens, size)
        residual = half(rng, tokens, size)
        weight = half(rng, size)
        normed = x.clone()
        added = residual.clone()
        rk.reference.fused_add_rmsnorm(normed, added, weight)
        gated = rk.reference.silu_and_mul(x)
        there = x.cuda()
        of = f"{tokens} x {size}"
        for group in (128, None):
            sums = residual.cuda()
            made = rk.rmsnorm_quant_fp8(there, weight.cuda(), group_size=group, residual=sums)
            compare(f"rmsnorm_quant_fp8 of {of}, groups {group}", widened(*made), normed, 5e-2)
            compare(f"residual of rmsnorm_quant_fp8 of {of}", sums, added, 5e-3)
            made = rk.silu_and_mul_quant_fp8(there, group_size=group)
            compare(f"silu_and_mul_quant_fp8 of {of}, groups {group}", widened(*made), gated, 5e-2)
        sums = residual.cuda()
        made = rk.rmsnorm_quant_int8(there, weight.cuda(), residual=sums)
        compare(f"rmsnorm_quant_int8 of {of}", widened(*made), normed, 3e-2)
        compare(f"residual of rmsnorm_quant_int8 of {of}", sums, added, 5e-3)
        for op in (rk.per_token_quant_fp8, rk.per_token_group_quant, rk.per_tensor_quant_fp8):
            compare(f"{op.__name__} of {of}", widened(*op(there)), x, 5e-2)


def widened(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers that codes stand for, [tokens, size]; a scale a row, a group or all."""
    groups = scales.shape[-1] if scales.ndim == 2 else 1
    whole = values.float().unflatten(-1, (groups, -1))
    return (whole * scales.reshape(-1, groups, 1)).flatten(-2)


def moe() -> None:
    """Routing and sorting by expert, for numbers of experts with kernels of their own."""
    rng = torch.Generator().manual_seed(0)
    for tokens, count in ((70, 128), (70, 16), (9, 256), (5, 600)):
        logits = torch.randn(tokens, count, generator=rng)
        bias = torch.randn(count, generator=rng)
        logits_there = logits.cuda()
        of = f"of {count} experts"
        weights, ids = rk.topk_softmax(logits_there, 8)
        compare(f"topk_softmax {of}", weights, rk.reference.topk_softmax(logits, 8)[0], 1e-6)
        weights, _ = rk.topk_sigmoid(logits_there, 8)
        compare(f"topk_sigmoid {of}", weights, rk.reference.topk_sigmoid(logits, 8)[0], 1e-6)
        weights, _ = rk.moe_fused_gate(logits_there, bias.cuda(), 4, 2, 6)
        expected = rk.reference.moe_fused_gate(logits, bias, 4, 2, 6)[0]
        compare(f"moe_fused_gate {of}", weights, expected, 1e-6)
        _, blocks, _ = rk.moe_align_block_size(ids, count, 16)
        _, expected, total = rk.reference.moe_align_block_size(ids.cpu(), count, 16)
        used = int(total) // 16
        compare(f"moe_align_block_size {of}", blocks[:used] + 1, expected[:used] + 1, 0)


def step() -> None:
    """The tensors of steps with chunks, drafts and padding, in wide and narrow page tables, and
    accepted tokens."""
    rng = torch.Generator().manual_seed(0)
    for decodes, chunks, padding, width in ((1, 0, 7, None), (70, 0, 2, 3), (9, 5, 3, None)):
        case = random_step(
            rng,
            decodes=decodes,
            chunks=chunks,
            padding=padding,
            page_size=16,
            drafts=3,
            width=width,
        )
        *given, page_size = case.given
        there = [x.cuda() for x in given]
        made = {name: x.cuda() for name, x in case.made.items()}
        rk.fill_step_tensors(*there, page_size, **made)
        rk.reference.fill_step_tensors(*given, page_size, **case.made)
        for name, x in made.items():
            compare(f"{name} of {decodes} and {chunks} entries", x + 2, case.made[name] + 2, 0)
    for ragged in (False, True):
        samples = random_samples(rng, 70, most=4, ragged=ragged)
        options = {"cu_samples": samples.cu_samples, "drafts": samples.drafts}
        there = [x.cuda() for x in samples.given]
        rk.accept_tokens(*there, **{name: on_gpu(x) for name, x in options.items()})
        rk.reference.accept_tokens(*samples.given, **options)
        compare("next_token", there[3], samples.next_token, 0)
        compare("committed_len", there[4], samples.committed_len, 0)
