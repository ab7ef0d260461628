"""Small shapes of the Hopper kernels for compute-sanitizer: each result is compared with the definition.

    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize prefill decode

`tools/sanitize.sh` runs every family under memcheck and racecheck. A family is a function below: rows and sizes that
reach the borders of its tiles and each of its kernels, and no larger, for racecheck slows a kernel a hundredfold. What
no Hopper kernel runs is an error: neither Triton, the reference nor cuBLAS is what is checked here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

import torch

import radix_kernels as rk
from radix_kernels import _dispatch
from radix_kernels.linear import fused_product
from tests.kernel.attention_cases import make_case
from tests.kernel.experts_cases import make as make_experts
from tests.kernel.on_device import no_library_for

FP8 = torch.float8_e4m3fn
HALF = torch.bfloat16


def on_gpu(x):
    return x.cuda() if isinstance(x, torch.Tensor) else x


def compare(name: str, got: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
    error = float((got.double().cpu() - expected.double()).norm() / expected.double().norm())
    print(f"{name}: error {error:.2e}", flush=True)
    if not error <= allowed:
        raise SystemExit(f"{name}: error {error:.3g}, allowed {allowed:g}")


def paged(name: str, rows: list, hint: int, allowed: float, fp8: str = "", **sizes) -> None:
    case = make_case(rows, torch.Generator().manual_seed(0), dtype=HALF, **sizes)
    scales = {}
    if fp8:
        case.k_cache, case.v_cache = case.k_cache.to(FP8), case.v_cache.to(FP8)
        scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
    if fp8 == "all":
        case.q = case.q.to(FP8)
        scales["q_scale"] = torch.tensor([0.75])
    expected = rk.reference.flash_attn_with_kvcache(*case.args, **scales)
    got = rk.flash_attn_with_kvcache(
        *map(on_gpu, case.args), **{k: v.cuda() for k, v in scales.items()}, max_seqlen_q=hint
    )
    compare(name, got, expected, allowed)


def prefill() -> None:
    rows, hint = [(150, 300), (5, 40), (0, 3)], 150
    paged("prefill, a pair of blocks", rows, hint, 5e-3, heads=(4, 2), dim=128)
    paged("prefill, one block", rows, 30, 5e-3, heads=(4, 2), dim=128, page_size=4)
    paged("prefill of 64", rows, hint, 5e-3, heads=(4, 2), dim=64)
    paged("prefill of 192 and 128", rows, hint, 5e-3, heads=(2, 2), dim=192, v_dim=128)
    paged("prefill of 256", rows, hint, 5e-3, heads=(2, 2), dim=256)
    paged("prefill in FP8, a pair of blocks", rows, hint, 4e-2, "all", heads=(4, 2), dim=128)
    paged("prefill in FP8, one block", rows, 30, 4e-2, "all", heads=(4, 2), dim=128, page_size=4)


def decode() -> None:
    rows = [(1, 700), (1, 40), (1, 1)]
    paged("decode", rows, 1, 5e-3, heads=(8, 2), dim=128)
    paged("decode of two tokens, one a page", [(2, 530), (2, 20)], 2, 5e-3, heads=(20, 2), dim=128, page_size=1)
    paged("decode of 64", rows, 1, 5e-3, heads=(8, 2), dim=64)
    paged("decode of 256", rows, 1, 5e-3, heads=(8, 2), dim=256)
    paged("decode of an FP8 cache", rows, 1, 5e-3, "cache", heads=(8, 2), dim=128)
    for dim in (128, 256):  # so many KV heads that a block has several chunks, one after the other
        paged(f"decode of {dim} in long runs", [(1, 513)] * 3 + [(1, 2000)], 1, 5e-3, heads=(264, 66), dim=dim)


def mla() -> None:
    """Few heads and many, parts of rows joined by one group of threads and by all, pages by boxes and by tokens."""
    for heads, page, lens, fp8 in (
        (16, 64, (300, 17), False), (128, 64, (300, 17), False), (16, 64, (2200, 17), False),
        (128, 64, (2200, 17), False), (80, 1, (530, 17), False), (16, 64, (300, 17), True),
        (128, 64, (300, 17), True), (128, 64, (2200, 17), True), (80, 1, (530, 17), True),
    ):  # fmt: skip
        rng = torch.Generator().manual_seed(0)
        q, rope = (torch.randn(2, heads, d, generator=rng).to(HALF) for d in (512, 64))
        needed = [-(-n // page) for n in lens]
        cache = torch.randn(sum(needed) + 2, page, 576, generator=rng).to(HALF)
        if fp8:
            cache = rk.reference.pack_mla_tokens(cache[..., :512], cache[..., 512:])
        free = torch.randperm(len(cache), generator=rng).to(torch.int32)
        table = torch.stack((free[: needed[0]], free[needed[0] :][: needed[1]].repeat(needed[0])[: needed[0]]))
        counts = (torch.tensor(x, dtype=torch.int32) for x in (lens, (0, 1, 2)))
        args = (q, rope, cache, table, *counts)
        expected = rk.reference.mla_decode(*args, softmax_scale=192**-0.5)
        got = rk.mla_decode(*map(on_gpu, args), softmax_scale=192**-0.5, max_seqlen_q=1)
        name = f"mla_decode, {heads} heads, {lens} tokens in pages of {page}{' in FP8' if fp8 else ''}"
        compare(name, got, expected, 1e-2 if fp8 else 5e-3)


def gemm() -> None:
    rng = torch.Generator().manual_seed(0)
    for tokens in (1, 17, 64, 200):
        x, w = (torch.randn(n, 512, generator=rng) for n in (tokens, 272))
        if tokens <= 64:
            half, weight = x.to(HALF).cuda(), w.to(HALF).cuda()
            if fused_product(half, weight) is None:
                raise SystemExit(f"linear, {tokens} tokens: left to cuBLAS")
            expected = x.to(HALF).double() @ w.to(HALF).double().T
            compare(f"linear, {tokens} tokens", rk.linear(half, weight), expected, 5e-3)
        x, w = x.to(FP8), w.to(FP8)
        scales = [torch.rand(n, 1, generator=rng) + 0.5 for n in (tokens, 272)]
        expected = (x.double() * scales[0]) @ (w.double() * scales[1]).T
        got = rk.fp8_scaled_mm(x.cuda(), w.cuda().T, scales[0].cuda(), scales[1].cuda(), HALF)
        compare(f"fp8_scaled_mm, {tokens} tokens", got, expected, 6e-3)
    for tokens in (17, 200, 300):
        x, w = (torch.randn(n, 512, generator=rng).to(HALF) for n in (tokens, 272))
        residual = torch.randn(tokens, 272, generator=rng).to(HALF)
        expected = x.double() @ w.double().T + residual.double()
        got = rk.linear(x.cuda(), w.cuda(), residual=residual.cuda())
        compare(f"linear with a residual, {tokens} tokens", got, expected, 5e-3)
        got = rk.linear_silu_and_mul(x.cuda(), w.cuda())
        compare(f"linear_silu_and_mul, {tokens} tokens", got, rk.reference.linear_silu_and_mul(x, w), 6e-3)


def grouped() -> None:
    """Small groups and large ones, which have kernels of their own in FP8; one group without rows."""
    rng = torch.Generator().manual_seed(0)
    for counts in ([5, 0, 40], [600, 0, 129]):
        rows = [-(-n // 128) * 128 for n in counts]
        indices = torch.cat([torch.arange(r).ge(n).int().neg() for n, r in zip(counts, rows, strict=True)])
        indices += (indices + 1) * torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor(rows))
        for fp8 in (False, True):
            x, w = torch.randn(sum(rows), 256, generator=rng), torch.randn(3, 208, 256, generator=rng)
            scales = {}
            if fp8:
                scales["x_scale"] = torch.rand(sum(rows), 2, generator=rng) + 0.5
                scales["weight_scale"] = torch.rand(3, 2, 2, generator=rng) + 0.5
            x, w = (t.to(FP8 if fp8 else HALF) for t in (x, w))
            there = {k: v.cuda() for k, v in scales.items()}
            used = indices >= 0
            got = rk.m_grouped_gemm_contiguous(x.cuda(), w.cuda(), indices.cuda(), **there).cpu()
            expected = rk.reference.m_grouped_gemm_contiguous(x, w, indices, **scales)
            compare(f"m_grouped_gemm_contiguous of {counts}, {x.dtype}", got[used], expected[used], 6e-3)


def pointwise() -> None:
    rng = torch.Generator().manual_seed(0)
    for tokens, size in ((1, 1024), (70, 1024), (9, 8192)):
        x, residual, weight = (
            torch.randn(*shape, size, generator=rng).to(HALF) for shape in ((tokens,), (tokens,), ())
        )
        compare(
            f"rmsnorm, {tokens} x {size}", rk.rmsnorm(x.cuda(), weight.cuda()), rk.reference.rmsnorm(x, weight), 5e-3
        )
        got = rk.silu_and_mul(x.cuda())
        compare(f"silu_and_mul, {tokens} x {size}", got, rk.reference.silu_and_mul(x), 5e-3)
        values, scales = rk.rmsnorm_quant_fp8(x.cuda(), weight.cuda())
        expected = rk.reference.rmsnorm(x, weight)
        whole = (values.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2)
        compare(f"rmsnorm_quant_fp8, {tokens} x {size}", whole, expected, 5e-2)
        there = x.cuda(), residual.cuda()
        rk.fused_add_rmsnorm(*there, weight.cuda())
        rk.reference.fused_add_rmsnorm(x, residual, weight)
        compare(f"fused_add_rmsnorm, {tokens} x {size}", there[0], x, 5e-3)
    table = rk.rope_cos_sin_cache(128, 64, 1e4)
    for heads, kv_heads, tokens in ((4, 2, 1), (32, 8, 70)):
        q, k = (torch.randn(tokens, h, 128, generator=rng).to(HALF) for h in (heads, kv_heads))
        positions = torch.arange(tokens) % 64
        there = q.cuda(), k.cuda()
        rk.apply_rope_inplace(positions.cuda(), *there, 128, table.cuda())
        rk.reference.apply_rope_inplace(positions, q, k, 128, table)
        compare(f"apply_rope_inplace, {tokens} tokens of {heads} heads", there[0], q, 5e-3)


def experts() -> None:
    """Each of the native kernels: few pairs, sorted ones in small tiles and pairs of blocks, many in FP8."""
    for scales, quantized in (("", False), ("block", False), ("block", True)):
        for tokens, count, topk in ((9, 8, 3), (24, 8, 2), (150, 2, 1), (450, 2, 1)):
            rng = torch.Generator().manual_seed(0)
            case = make_experts(tokens, count, topk, 256, 128, HALF, rng, scales=scales)
            options = {**case.options, "use_fp8_w8a8": quantized}
            args = (case.x, case.w1, case.w2, case.weights, case.ids)
            got = rk.fused_experts(*map(on_gpu, args), **{k: on_gpu(v) for k, v in options.items()})
            expected = rk.reference.fused_experts(args[0].double(), *args[1:3], args[3].double(), args[4], **options)
            kind = "in FP8" if quantized else "with FP8 weights" if scales else "in bfloat16"
            compare(f"fused_experts {kind}, {tokens} tokens", got, expected, 1.5e-2)


def moe() -> None:
    rng = torch.Generator().manual_seed(0)
    for tokens, count in ((70, 128), (70, 16), (9, 256), (5, 600)):
        logits, bias = torch.randn(tokens, count, generator=rng), torch.randn(count, generator=rng)
        there = logits.cuda(), bias.cuda()
        for name, got, expected in (
            ("topk_softmax", rk.topk_softmax(there[0], 8), rk.reference.topk_softmax(logits, 8)),
            ("topk_sigmoid", rk.topk_sigmoid(there[0], 8), rk.reference.topk_sigmoid(logits, 8)),
            ("moe_fused_gate", rk.moe_fused_gate(*there, 4, 2, 6), rk.reference.moe_fused_gate(logits, bias, 4, 2, 6)),
        ):
            compare(f"{name} of {count} experts", got[0], expected[0], 1e-6)
        ids = rk.topk_softmax(there[0], 8)[1]
        got, expected = (f(i, count, 16)[1] for f, i in ((rk.moe_align_block_size, ids),
                                                         (rk.reference.moe_align_block_size, ids.cpu())))  # fmt: skip
        used = int(rk.reference.moe_align_block_size(ids.cpu(), count, 16)[2]) // 16
        compare(f"moe_align_block_size of {count} experts", got[:used] + 1, expected[:used] + 1, 0)


FAMILIES: dict[str, Callable[[], None]] = {
    "prefill": prefill,
    "decode": decode,
    "mla": mla,
    "gemm": gemm,
    "grouped": grouped,
    "experts": experts,
    "moe": moe,
    "pointwise": pointwise,
}


def main() -> None:
    if why := no_library_for("cuda"):
        raise SystemExit(f"nothing to check: {why}")
    if _dispatch.isa() != "sm_90":
        raise SystemExit(f"nothing to check: the GPU is {_dispatch.isa()}, the kernels are for sm_90")
    rk.set_fallback("error")
    with mock.patch.object(_dispatch, "triton_installed", return_value=False):
        for family in sys.argv[1:] or FAMILIES:
            FAMILIES[family]()


if __name__ == "__main__":
    main()
