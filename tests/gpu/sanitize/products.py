"""Products: dense, FP8, INT8, grouped, and those of experts."""

from __future__ import annotations

from unittest import mock

import torch

import radix_kernels as rk
from radix_kernels import _choices
from radix_kernels._products import hopper_kernel
from tests.gpu.sanitize.compare import FP8, HALF, compare, on_gpu
from tests.kernel.code_experts import CodeKind, random_experts
from tests.kernel.experts_cases import make as make_experts
from tests.kernel.forced_chip import forced_chip


def fp8_product(m: int, n: int, k: int, rng: torch.Generator, dtype: torch.dtype = HALF) -> None:
    """Scales of rows, with sums kept in the tensor cores too, and of blocks."""
    x, w = (torch.randn(rows, k, generator=rng).to(FP8) for rows in (m, n))
    row = torch.rand(m, 1, generator=rng) + 0.5
    column = torch.rand(n, 1, generator=rng) + 0.5
    there = (x.cuda(), w.cuda().T)
    expected = (x.double() * row) @ (w.double() * column).T
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


def int8_product(m: int, n: int, k: int, rng: torch.Generator, dtype: torch.dtype = HALF) -> None:
    """Scales of rows, with zero points and a bias too."""
    x, w = (torch.randint(-128, 128, (rows, k), generator=rng, dtype=torch.int8) for rows in (m, n))
    row = (torch.rand(m, 1, generator=rng) + 0.5) / 2**8
    column = torch.rand(n, 1, generator=rng) + 0.5
    azp = torch.randint(-128, 128, (m, 1), generator=rng, dtype=torch.int32)
    bias = torch.randn(n, generator=rng)
    there = (x.cuda(), w.cuda().T, row.cuda(), column.cuda().T, dtype)
    expected = (x.double() @ w.double().T) * row * column.T
    compare(f"int8_scaled_mm, {m} x {n} x {k}, {dtype}", rk.int8_scaled_mm(*there), expected, 4e-3)
    sums = w.sum(1, dtype=torch.int32).cuda()
    got = rk.int8_scaled_mm(*there, bias.cuda(), azp=azp.cuda(), b_sums=sums)
    expected = ((x.double() - azp) @ w.double().T) * row * column.T + bias
    compare(f"int8_scaled_mm with zero points, {m} x {n} x {k}, {dtype}", got, expected, 4e-3)


def before_hopper() -> None:
    """The products of Ada, which run as PTX: each tile, of rows and columns that are not all there,
    and slices of k that are filled more than once."""
    rng = torch.Generator().manual_seed(0)
    with forced_chip("sm_89", "int8_scaled_mm", "fp8_scaled_mm"):
        for m, n, k in ((9, 80, 144), (16, 272, 1040), (40, 144, 784), (130, 272, 912)):
            for dtype in (HALF, torch.float16):
                int8_product(m, n, k, rng, dtype)
                row_scaled_fp8_product(m, n, k, rng, dtype)


def row_scaled_fp8_product(
    m: int, n: int, k: int, rng: torch.Generator, dtype: torch.dtype
) -> None:
    x, w = (torch.randn(rows, k, generator=rng).to(FP8) for rows in (m, n))
    row = torch.rand(m, 1, generator=rng) + 0.5
    column = torch.rand(n, 1, generator=rng) + 0.5
    got = rk.fp8_scaled_mm(x.cuda(), w.cuda().T, row.cuda(), column.cuda(), dtype)
    expected = (x.double() * row) @ (w.double() * column).T
    compare(f"fp8_scaled_mm, {m} x {n} x {k}, {dtype}", got, expected, 6e-3)


def refill() -> None:
    """Products whose stages are filled more than once, most with a second tile for a block or a
    cluster of 132 multiprocessors, begun before the first has left."""
    rng = torch.Generator().manual_seed(0)
    for m, n, k in (
        (2250, 3456, 512),  # tiles of 256 tokens (fast_accum: 256 columns), two for a cluster
        (300, 12672, 768),  # of 128, likewise
        (100, 512, 4096),
        (17, 272, 8192),  # pairs and fours of blocks share k
        (17, 21120, 768),
        (64, 34048, 640),  # few tokens
    ):
        fp8_product(m, n, k, rng)
    fp8_product(2250, 3472, 512, rng, torch.float16)  # a weight that ends within a tile
    for m, n, k in ((2250, 3472, 640), (100, 512, 4096), (128, 30000, 768), (17, 272, 8192)):
        int8_product(m, n, k, rng)
    int8_product(64, 34048, 640, rng, torch.float16)
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
    """Dense, FP8 and INT8 products of few and of many tokens, with a residual and a gate."""
    rng = torch.Generator().manual_seed(0)
    for tokens in (1, 17, 64, 200):
        x, w = (torch.randn(n, 512, generator=rng) for n in (tokens, 272))
        if tokens <= 64:
            half = x.to(HALF).cuda()
            weight = w.to(HALF).cuda()
            if hopper_kernel(half, weight) is None:
                raise SystemExit(f"linear, {tokens} tokens: left to cuBLAS")
            expected = x.to(HALF).double() @ w.to(HALF).double().T
            compare(f"linear, {tokens} tokens", rk.linear(half, weight), expected, 5e-3)
        x = x.to(FP8)
        w = w.to(FP8)
        scales = [torch.rand(n, 1, generator=rng) + 0.5 for n in (tokens, 272)]
        expected = (x.double() * scales[0]) @ (w.double() * scales[1]).T
        got = rk.fp8_scaled_mm(x.cuda(), w.cuda().T, scales[0].cuda(), scales[1].cuda(), HALF)
        compare(f"fp8_scaled_mm, {tokens} tokens", got, expected, 6e-3)
        int8_product(tokens, 272, 528, rng)
    # Tiles of 256 tokens, one for a cluster, no stage filled twice.
    fp8_product(2200, 1280, 256, rng)
    fp8_product(200, 272, 512, rng, torch.float16)
    for tokens in (17, 200, 300):
        x, w = (torch.randn(n, 512, generator=rng).to(HALF) for n in (tokens, 272))
        residual = torch.randn(tokens, 272, generator=rng).to(HALF)
        expected = x.double() @ w.double().T + residual.double()
        got = rk.linear(x.cuda(), w.cuda(), residual=residual.cuda())
        compare(f"linear with a residual, {tokens} tokens", got, expected, 5e-3)
        got = rk.linear_silu_and_mul(x.cuda(), w.cuda())
        expected = rk.reference.linear_silu_and_mul(x, w)
        compare(f"linear_silu_and_mul, {tokens} tokens", got, expected, 6e-3)


def last_tiles() -> None:
    """16-bit products of more tokens than fill whole tiles: operands swapped, in each of its sizes,
    k shared by two blocks and not, gated ones, one or two warpgroups."""
    rng = torch.Generator().manual_seed(0)
    with mock.patch.object(_choices, "blas_is_ahead_of_fused", lambda *args, gated: False):
        for tokens in (66, 100, 130, 150, 161):
            for n, k in ((1032, 2056), (72, 136)):
                fused_products(tokens, n, k, rng)
        fused_products(130, 3080, 8192, rng)


def fused_products(tokens: int, n: int, k: int, rng: torch.Generator) -> None:
    """A product with a residual, and a gated one of as many results."""
    x = torch.randn(tokens, k, generator=rng).to(HALF)
    w = torch.randn(n, k, generator=rng).to(HALF)
    both = torch.randn(2 * n, k, generator=rng).to(HALF)  # gate and up
    residual = torch.randn(tokens, n, generator=rng).to(HALF)
    got = rk.linear(x.cuda(), w.cuda(), residual=residual.cuda())
    expected = x.double() @ w.double().T + residual.double()
    compare(f"linear with a residual, {tokens} x {n} x {k}", got, expected, 5e-3)
    gate, up = (x.double() @ both.double().T).chunk(2, -1)
    got = rk.linear_silu_and_mul(x.cuda(), both.cuda())
    expected = torch.nn.functional.silu(gate) * up
    compare(f"linear_silu_and_mul, {tokens} x {n} x {k}", got, expected, 1.2e-2)


def grouped() -> None:
    """Small groups and large ones, which have kernels of their own in FP8; one group without
    rows."""
    for counts in ([5, 0, 40], [600, 0, 129]):
        for dtype in (HALF, torch.float16, FP8):
            grouped_rows(counts, 208, 256, dtype)


def grouped_rows(counts: list[int], n: int, k: int, dtype: torch.dtype) -> None:
    """One contiguous grouped product of three groups with these counts of rows."""
    rng = torch.Generator().manual_seed(0)
    rows = [-(-count // 128) * 128 for count in counts]
    owners = []  # each group's rows, then -1 up to the next whole tile
    for group, (count, padded) in enumerate(zip(counts, rows, strict=True)):
        owners += [group] * count + [-1] * (padded - count)
    indices = torch.tensor(owners, dtype=torch.int32)
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


def experts() -> None:
    """Each of the native kernels: few pairs, sorted ones in small tiles and pairs of blocks, many
    in FP8."""
    for scales, quantized in (("", False), ("block", False), ("block", True)):
        for tokens, count, topk in ((9, 8, 3), (24, 8, 2), (150, 2, 1), (450, 2, 1)):
            for dtype in (HALF, torch.float16):
                expert_rows((tokens, count, topk, 256, 128), scales, quantized, dtype)


def expert_rows(shape: tuple[int, ...], scales: str, quantized: bool, dtype: torch.dtype) -> None:
    """One call of fused_experts; shape: tokens, experts, topk, hidden, intermediate."""
    tokens, count, topk, hidden, inter = shape
    rng = torch.Generator().manual_seed(0)
    case = make_experts(tokens, count, topk, hidden, inter, dtype, rng, scales=scales)
    options = {**case.options, "use_fp8_w8a8": quantized}
    there = [on_gpu(x) for x in (case.x, case.w1, case.w2, case.weights, case.ids)]
    options_there = {key: on_gpu(value) for key, value in options.items()}
    got = rk.fused_experts(*there, **options_there)
    expected = rk.reference.fused_experts(
        case.x.double(), case.w1, case.w2, case.weights.double(), case.ids, **options
    )
    kind = "without scales"
    if quantized:
        kind = "in FP8"
    elif scales:
        kind = "with FP8 weights"
    compare(f"fused_experts {kind}, {shape}, {dtype}", got, expected, 1.5e-2)


def code_experts() -> None:
    """Experts of 4 bits: rings filled more than once, tiles of up to 64 and of up to 128 pairs, up
    rows that begin within a tile, a last tile and a last 128 of k that are not full."""
    forms = (
        CodeKind(kind="int4", group=128, zeros=True),
        CodeKind(kind="int4", group=64),
        CodeKind(kind="int4", group=32),
        CodeKind(kind="mxfp4", group=32, scale_dtype=torch.uint8),
    )
    for form in forms:
        for dtype in (HALF, torch.float16):
            code_expert_rows((24, 8, 2, 264, 80), form, dtype)
            code_expert_rows((150, 2, 1, 200, 112), form, dtype)
    # More tiles than multiprocessors, of more k than the ring has stages.
    code_expert_rows((200, 3, 2, 2304, 1536), forms[3], HALF)


def code_expert_rows(
    shape: tuple[int, int, int, int, int], form: CodeKind, dtype: torch.dtype
) -> None:
    """One call of fused_experts_packed with biases and the clamped SwiGLU."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(shape[0], shape[3], generator=rng).to(dtype)
    experts = random_experts(shape, form, x, rng)
    case = experts.case.with_biases(rng, dtype)
    there = [on_gpu(t) for t in (case.weights, case.ids)]
    biases = {name: on_gpu(case.options[name]) for name in ("bias1", "bias2")}
    got = rk.fused_experts_packed(
        x.cuda(), experts.pack("cuda"), *there, **biases, activation="swiglu_clamped"
    )
    expected = rk.reference.fused_experts(
        x.double(),
        case.w1,
        case.w2,
        case.weights.double(),
        case.ids,
        **case.options,
        activation="swiglu_clamped",
    )
    compare(f"fused_experts_packed {form}, {shape}, {dtype}", got, expected, 1.5e-2)
