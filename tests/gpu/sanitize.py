"""Small shapes of the Hopper kernels for compute-sanitizer: each result is compared with the
definition.

    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize prefill decode

`tools/sanitize.sh` runs every family under memcheck and racecheck. A family is a function below:
rows and sizes that reach the borders of its tiles and each of its kernels, and no larger, for
racecheck slows a kernel a hundredfold. What no Hopper kernel runs is an error: neither Triton, the
reference nor cuBLAS is what is checked here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

import torch

import radix_kernels as rk
from radix_kernels import _dispatch
from radix_kernels._products import hopper_kernel
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


def paged(
    name: str, rows: list, hint: int, allowed: float, fp8: str = "", dtype: torch.dtype = HALF,
    options: dict | None = None, **sizes,
) -> None:  # fmt: skip
    rng = torch.Generator().manual_seed(0)
    case = make_case(rows, rng, dtype=dtype, **sizes)
    options = dict(options or {})
    if options.get("sinks"):
        options["sinks"] = torch.randn(case.q.shape[1], generator=rng)
    scales = {}
    if fp8:
        case.k_cache, case.v_cache = case.k_cache.to(FP8), case.v_cache.to(FP8)
        scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
    if fp8 == "all":
        case.q = case.q.to(FP8)
        scales["q_scale"] = torch.tensor([0.75])
    options |= scales
    expected = rk.reference.flash_attn_with_kvcache(*case.args, **options)
    got = rk.flash_attn_with_kvcache(
        *map(on_gpu, case.args), **{k: on_gpu(v) for k, v in options.items()}, max_seqlen_q=hint
    )
    compare(name, got, expected, allowed)


# What the kernels have branches of their own for.
OPTIONS = {
    "a window": {"window_size": (100, 0)},
    "a cap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all keys": {"causal": False},
}


def prefill() -> None:
    rows, hint = [(150, 300), (5, 40), (0, 3)], 150
    paged("prefill, a pair of blocks", rows, hint, 5e-3, heads=(4, 2), dim=128)
    paged("prefill, one block", rows, 30, 5e-3, heads=(4, 2), dim=128, page_size=4)
    paged("prefill of 64", rows, hint, 5e-3, heads=(4, 2), dim=64)
    paged("prefill of 192 and 128", rows, hint, 5e-3, heads=(2, 2), dim=192, v_dim=128)
    paged("prefill of 256", rows, hint, 5e-3, heads=(2, 2), dim=256)
    paged("prefill in FP8, a pair of blocks", rows, hint, 4e-2, "all", heads=(4, 2), dim=128)
    paged("prefill in FP8, one block", rows, 30, 4e-2, "all", heads=(4, 2), dim=128, page_size=4)
    paged("prefill of 64 in FP8", rows, hint, 4e-2, "all", heads=(4, 2), dim=64)
    paged("prefill of 192", rows, hint, 5e-3, heads=(2, 2), dim=192)
    for dim, v_dim in ((64, 64), (192, 128), (192, 192), (256, 256)):
        name = f"prefill of {dim} and {v_dim}, gathered"
        paged(name, rows, 30, 5e-3, heads=(2, 2), dim=dim, v_dim=v_dim, page_size=4)
    for name, options in OPTIONS.items():
        paged(f"prefill with {name}", rows, hint, 5e-3, options=options, heads=(4, 2), dim=128)
        paged(
            f"prefill in FP8 with {name}",
            rows,
            hint,
            4e-2,
            "all",
            options=options,
            heads=(4, 2),
            dim=128,
        )
    for dim, page in ((64, 16), (128, 16), (128, 4), (256, 16)):
        sizes = {"heads": (4, 2), "dim": dim, "page_size": page}
        paged(f"prefill of {dim} in float16", rows, hint, 1e-3, dtype=torch.float16, **sizes)
    for dim in (64, 128):  # a block has one tile after the other
        paged(f"prefill of {dim}, many heads", rows, hint, 5e-3, heads=(80, 80), dim=dim)


def decode() -> None:
    rows = [(1, 700), (1, 40), (1, 1)]
    paged("decode", rows, 1, 5e-3, heads=(8, 2), dim=128)
    paged(
        "decode of two tokens, one a page",
        [(2, 530), (2, 20)],
        2,
        5e-3,
        heads=(20, 2),
        dim=128,
        page_size=1,
    )
    paged("decode of 64", rows, 1, 5e-3, heads=(8, 2), dim=64)
    paged("decode of 256", rows, 1, 5e-3, heads=(8, 2), dim=256)
    paged("decode of an FP8 cache", rows, 1, 5e-3, "cache", heads=(8, 2), dim=128)
    for dim, dtype in (
        (64, HALF),
        (256, HALF),
        (64, torch.float16),
        (128, torch.float16),
        (256, torch.float16),
    ):
        for queries in (1, 9):  # one tile of rows, and two
            name = f"decode of {queries} tokens, an FP8 cache of {dim}, {dtype}"
            paged(
                name,
                [(queries, 700), (queries, 40)],
                queries,
                5e-3,
                "cache",
                dtype,
                heads=(8, 2),
                dim=dim,
            )
    for dim in (64, 128, 256):
        paged(
            f"decode of {dim} in float16", rows, 1, 1e-3, dtype=torch.float16, heads=(8, 2), dim=dim
        )
    for name, options in OPTIONS.items():
        for fp8 in ("", "cache"):
            kind = " of an FP8 cache" if fp8 else ""
            paged(
                f"decode{kind} with {name}",
                rows,
                1,
                5e-3,
                fp8,
                options=options,
                heads=(8, 2),
                dim=128,
            )
    for dim in (128, 256):  # so many KV heads that a block has several chunks, one after the other
        paged(
            f"decode of {dim} in long runs",
            [(1, 513)] * 3 + [(1, 2000)],
            1,
            5e-3,
            heads=(264, 66),
            dim=dim,
        )


def mla() -> None:
    """Few heads and many, rows of one length, parts joined by one group of threads and by all,
    boxes and tokens."""
    for heads, page, lens, fp8 in (
        (16, 64, (300, 17), False), (128, 64, (300, 17), False), (16, 64, (2200, 17), False),
        (128, 64, (2200, 17), False), (80, 1, (530, 17), False), (16, 1, (530, 17), False),
        (16, 64, (600, 600), False), (64, 64, (600, 600), False), (64, 64, (600, 600), True),
        (16, 64, (300, 17), True), (128, 64, (300, 17), True), (128, 64, (2200, 17), True), (80, 1, (530, 17), True),
    ):  # fmt: skip
        mla_rows(heads, page, lens, fp8)
    for heads in (16, 20):  # one tile of rows, and two
        for fp8, dtype in ((False, HALF), (True, HALF), (False, torch.float16)):
            mla_rows(heads, 64, (1100, 17), fp8, dtype, batch_invariant=True)
            mla_rows(heads, 1, (530, 17), fp8, dtype, batch_invariant=True)
    for heads in (16, 64, 128):
        mla_rows(heads, 64, (2200, 17), False, torch.float16)


def mla_rows(
    heads: int, page: int, lens: tuple, fp8: bool, dtype: torch.dtype = HALF, **options
) -> None:
    rng = torch.Generator().manual_seed(0)
    q, rope = (torch.randn(2, heads, d, generator=rng).to(dtype) for d in (512, 64))
    needed = [-(-n // page) for n in lens]
    cache = torch.randn(sum(needed) + 2, page, 576, generator=rng).to(dtype)
    if fp8:
        cache = rk.reference.pack_mla_tokens(cache[..., :512], cache[..., 512:])
    free = torch.randperm(len(cache), generator=rng).to(torch.int32)
    table = torch.stack(
        (free[: needed[0]], free[needed[0] :][: needed[1]].repeat(needed[0])[: needed[0]])
    )
    counts = (torch.tensor(x, dtype=torch.int32) for x in (lens, (0, 1, 2)))
    args = (q, rope, cache, table, *counts)
    expected = rk.reference.mla_decode(*args, softmax_scale=192**-0.5)
    got = rk.mla_decode(*map(on_gpu, args), softmax_scale=192**-0.5, max_seqlen_q=1, **options)
    kind = " in FP8" if fp8 else "" if dtype == HALF else " in float16"
    kind += ", batch_invariant" if options else ""
    name = f"mla_decode, {heads} heads, {lens} tokens in pages of {page}{kind}"
    compare(name, got, expected, 1e-2 if fp8 else 5e-3)


def stores() -> None:
    """Latent tokens in words of 16 bytes and of 2, and in FP8; keys and values; full keys; two
    partial attentions."""
    rng = torch.Generator().manual_seed(0)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(HALF)

    slots = torch.randperm(80, generator=rng)[:70]
    slots[3] = -1
    for latent, rope, width in ((512, 64, 576), (24, 10, 34), (512, 64, 656)):
        tokens = half(70, latent), half(70, rope)
        cache = torch.zeros(5, 16, width, dtype=torch.uint8 if width == 656 else HALF)
        there = cache.cuda()
        rk.store_mla_kv(*map(on_gpu, tokens), there, slots.cuda())
        rk.reference.store_mla_kv(*tokens, cache, slots)
        compare(f"store_mla_kv, {latent} and {rope}, {cache.dtype}", there, cache, 0)
    for nope, rope in ((128, 64), (20, 6)):
        k, parts = (
            torch.zeros(70, 5, nope + rope, dtype=HALF),
            (half(70, 5, nope), half(70, 1, rope)),
        )
        there = k.cuda()
        rk.concat_mla_k(there, *map(on_gpu, parts))
        compare(
            f"concat_mla_k, {nope} and {rope}",
            there,
            torch.cat((parts[0], parts[1].expand(-1, 5, -1)), -1),
            0,
        )
    for dim in (128, 20):  # pieces of 16 bytes and single elements, copied and quantized
        k, v = half(70, 5, dim), half(70, 5, dim)
        for dtype, scales in (
            (HALF, {}),
            (FP8, {"k_scale": torch.rand(5) + 0.5, "v_scale": torch.rand(5) + 0.5}),
        ):
            caches = [torch.zeros(5, 16, 5, dim).to(dtype) for _ in range(2)]
            there = [x.cuda() for x in caches]
            on_it = {name: x.cuda() for name, x in scales.items()}
            rk.store_kv_cache(on_gpu(k), on_gpu(v), *there, slots.cuda(), **on_it)
            rk.reference.store_kv_cache(k, v, *caches, slots, **scales)
            for x, y in zip(there, caches, strict=True):
                compare(f"store_kv_cache of {dim}, {dtype}", x.float(), y.float(), 0)
    for dtype in (HALF, torch.float16, torch.float32):
        for dim in (128, 20):
            a, b = (torch.randn(70, 5, dim, generator=rng).to(dtype) for _ in range(2))
            lses = [torch.randn(70, 5, generator=rng) for _ in range(2)]
            lses[0][3] = -torch.inf
            args = (a, lses[0], b, lses[1])
            expected = rk.reference.merge_state(*args)
            for place in ({}, {"out": 0, "lse": 1}):  # the second into side a's
                there = [on_gpu(x) for x in args]
                got = rk.merge_state(*there, **{name: there[i] for name, i in place.items()})
                for x, y, allowed in zip(got, expected, (5e-3, 1e-5), strict=True):
                    compare(f"merge_state of {dim}, {dtype}", x, y, allowed)


def fp8_product(m: int, n: int, k: int, rng: torch.Generator, dtype: torch.dtype = HALF) -> None:
    """Scales of rows, with sums kept in the tensor cores too, and of blocks."""
    x, w = (torch.randn(rows, k, generator=rng).to(FP8) for rows in (m, n))
    row, column = torch.rand(m, 1, generator=rng) + 0.5, torch.rand(n, 1, generator=rng) + 0.5
    there, expected = (x.cuda(), w.cuda().T), (x.double() * row) @ (w.double() * column).T
    for fast in (False, True):
        got = rk.fp8_scaled_mm(*there, row.cuda(), column.cuda(), dtype, fast_accum=fast)
        compare(f"fp8_scaled_mm, {m} x {n} x {k}, fast_accum={fast}, {dtype}", got, expected, 1e-2)
    if n % 128:
        return
    blocks = (
        torch.rand(m, k // 128, generator=rng) + 0.5,
        torch.rand(n // 128, k // 128, generator=rng) + 0.5,
    )
    got = rk.fp8_blockwise_scaled_mm(*there, blocks[0].cuda(), blocks[1].cuda().T, dtype)
    wide = x.double() * blocks[0].double().repeat_interleave(128, 1)
    wide_w = w.double() * blocks[1].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    compare(f"fp8_blockwise_scaled_mm, {m} x {n} x {k}, {dtype}", got, wide @ wide_w.T, 6e-3)


def refill() -> None:
    """Products whose stages are filled more than once, most with a second tile for a block or a
    cluster of 132 multiprocessors, begun before the first has left."""
    rng = torch.Generator().manual_seed(0)
    for m, n, k in (
        (2250, 3456, 512),  # tiles of 256 tokens (fast_accum: 256 columns), two for a cluster
        (300, 12672, 768),  # of 128, likewise
        (100, 512, 4096), (17, 272, 8192),  # pairs and fours of blocks share k
        (17, 21120, 768), (64, 34048, 640),  # few tokens
    ):  # fmt: skip
        fp8_product(m, n, k, rng)
    fp8_product(2250, 3472, 512, rng, torch.float16)  # a weight that ends within a tile
    for dtype in (HALF, torch.float16):
        for m, n, k in ((2250, 3456, 320), (17, 21120, 384), (64, 34048, 320)):
            x, w, residual = (
                torch.randn(shape, generator=rng).to(dtype) for shape in ((m, k), (n, k), (m, n))
            )
            expected = x.double() @ w.double().T + residual.double()
            got = rk.linear(x.cuda(), w.cuda(), residual=residual.cuda())
            compare(f"linear with a residual, {m} x {n} x {k}, {dtype}", got, expected, 5e-3)
    for dtype in (HALF, FP8):
        grouped_rows([1300, 0, 1300], 1536, 768, dtype)
    for scales, quantized in (("", False), ("block", False), ("block", True)):
        for shape in ((600, 8, 2, 512, 2304), (1300, 2, 1, 1024, 1152)):
            expert_rows(shape, scales, quantized, HALF)


def gemm() -> None:
    rng = torch.Generator().manual_seed(0)
    for tokens in (1, 17, 64, 200):
        x, w = (torch.randn(n, 512, generator=rng) for n in (tokens, 272))
        if tokens <= 64:
            half, weight = x.to(HALF).cuda(), w.to(HALF).cuda()
            if hopper_kernel(half, weight) is None:
                raise SystemExit(f"linear, {tokens} tokens: left to cuBLAS")
            expected = x.to(HALF).double() @ w.to(HALF).double().T
            compare(f"linear, {tokens} tokens", rk.linear(half, weight), expected, 5e-3)
        x, w = x.to(FP8), w.to(FP8)
        scales = [torch.rand(n, 1, generator=rng) + 0.5 for n in (tokens, 272)]
        expected = (x.double() * scales[0]) @ (w.double() * scales[1]).T
        got = rk.fp8_scaled_mm(x.cuda(), w.cuda().T, scales[0].cuda(), scales[1].cuda(), HALF)
        compare(f"fp8_scaled_mm, {tokens} tokens", got, expected, 6e-3)
    fp8_product(
        2200, 1280, 256, rng
    )  # tiles of 256 tokens, one for a cluster, no stage filled twice
    fp8_product(200, 272, 512, rng, torch.float16)
    for tokens in (17, 200, 300):
        x, w = (torch.randn(n, 512, generator=rng).to(HALF) for n in (tokens, 272))
        residual = torch.randn(tokens, 272, generator=rng).to(HALF)
        expected = x.double() @ w.double().T + residual.double()
        got = rk.linear(x.cuda(), w.cuda(), residual=residual.cuda())
        compare(f"linear with a residual, {tokens} tokens", got, expected, 5e-3)
        got = rk.linear_silu_and_mul(x.cuda(), w.cuda())
        compare(
            f"linear_silu_and_mul, {tokens} tokens",
            got,
            rk.reference.linear_silu_and_mul(x, w),
            6e-3,
        )


def grouped() -> None:
    """Small groups and large ones, which have kernels of their own in FP8; one group without
    rows."""
    for counts in ([5, 0, 40], [600, 0, 129]):
        for dtype in (HALF, torch.float16, FP8):
            grouped_rows(counts, 208, 256, dtype)


def grouped_rows(counts: list[int], n: int, k: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    rows = [-(-count // 128) * 128 for count in counts]
    indices = torch.cat(
        [torch.arange(r).ge(m).int().neg() for m, r in zip(counts, rows, strict=True)]
    )
    indices += (indices + 1) * torch.arange(3, dtype=torch.int32).repeat_interleave(
        torch.tensor(rows)
    )
    x, w = (torch.randn(shape, generator=rng).to(dtype) for shape in ((sum(rows), k), (3, n, k)))
    scales = {}
    if dtype == FP8:
        scales["x_scale"] = torch.rand(sum(rows), k // 128, generator=rng) + 0.5
        scales["weight_scale"] = torch.rand(3, -(-n // 128), k // 128, generator=rng) + 0.5
    there = {name: scale.cuda() for name, scale in scales.items()}
    used = indices >= 0
    got = rk.m_grouped_gemm_contiguous(x.cuda(), w.cuda(), indices.cuda(), **there).cpu()
    expected = rk.reference.m_grouped_gemm_contiguous(x, w, indices, **scales)
    compare(f"m_grouped_gemm_contiguous of {counts}, {dtype}", got[used], expected[used], 6e-3)


def pointwise() -> None:
    rng = torch.Generator().manual_seed(0)
    for tokens, size in ((1, 1024), (70, 1024), (9, 8192)):
        x, residual, weight = (
            torch.randn(*shape, size, generator=rng).to(HALF)
            for shape in ((tokens,), (tokens,), ())
        )
        compare(
            f"rmsnorm, {tokens} x {size}",
            rk.rmsnorm(x.cuda(), weight.cuda()),
            rk.reference.rmsnorm(x, weight),
            5e-3,
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
    """Each of the native kernels: few pairs, sorted ones in small tiles and pairs of blocks, many
    in FP8."""
    for scales, quantized in (("", False), ("block", False), ("block", True)):
        for tokens, count, topk in ((9, 8, 3), (24, 8, 2), (150, 2, 1), (450, 2, 1)):
            for dtype in (HALF, torch.float16):
                expert_rows((tokens, count, topk, 256, 128), scales, quantized, dtype)


def expert_rows(shape: tuple, scales: str, quantized: bool, dtype: torch.dtype) -> None:
    case = make_experts(*shape, dtype, torch.Generator().manual_seed(0), scales=scales)
    options = {**case.options, "use_fp8_w8a8": quantized}
    args = (case.x, case.w1, case.w2, case.weights, case.ids)
    got = rk.fused_experts(*map(on_gpu, args), **{k: on_gpu(v) for k, v in options.items()})
    expected = rk.reference.fused_experts(
        args[0].double(), *args[1:3], args[3].double(), args[4], **options
    )
    kind = "in FP8" if quantized else "with FP8 weights" if scales else "without scales"
    compare(f"fused_experts {kind}, {shape}, {dtype}", got, expected, 1.5e-2)


def moe() -> None:
    rng = torch.Generator().manual_seed(0)
    for tokens, count in ((70, 128), (70, 16), (9, 256), (5, 600)):
        logits, bias = torch.randn(tokens, count, generator=rng), torch.randn(count, generator=rng)
        there = logits.cuda(), bias.cuda()
        for name, got, expected in (
            ("topk_softmax", rk.topk_softmax(there[0], 8), rk.reference.topk_softmax(logits, 8)),
            ("topk_sigmoid", rk.topk_sigmoid(there[0], 8), rk.reference.topk_sigmoid(logits, 8)),
            (
                "moe_fused_gate",
                rk.moe_fused_gate(*there, 4, 2, 6),
                rk.reference.moe_fused_gate(logits, bias, 4, 2, 6),
            ),
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
    "stores": stores,
    "gemm": gemm,
    "grouped": grouped,
    "experts": experts,
    "moe": moe,
    "pointwise": pointwise,
    "refill": refill,
}


def main() -> None:
    if why := no_library_for("cuda"):
        raise SystemExit(f"nothing to check: {why}")
    if _dispatch.isa() != "sm_90":
        raise SystemExit(
            f"nothing to check: the GPU is {_dispatch.isa()}, the kernels are for sm_90"
        )
    rk.set_fallback("error")
    with mock.patch.object(_dispatch, "triton_installed", return_value=False):
        for family in sys.argv[1:] or FAMILIES:
            FAMILIES[family]()


if __name__ == "__main__":
    main()
