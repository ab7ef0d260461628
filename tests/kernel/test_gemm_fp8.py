"""FP8 products with scales of tensors, rows and blocks: against float64, bits, borders."""

from __future__ import annotations

import pytest
import torch

import radix_kernels as rk
from tests.kernel.gemm_cases import FP8, HALVES, exact, fp8, on_gpu, scales
from tests.kernel.helpers import assert_close, assert_same_bits, guarded, spread

pytestmark = pytest.mark.cover("values")

# Sums that the tensor cores keep over all of K: what is cut off grows with K.
FAST = {1024: FP8, 16384: {torch.float16: (5e-3, 4e-2), torch.bfloat16: (6e-3, 4e-2)}}


@pytest.mark.combinations(
    kind=["tensor", "row", "row and bias"],
    tokens=[0, 1, 9, 16, 33, 64, 65, 127, 128, 129, 300],
    shape=[(16, 16), (48, 272), (272, 1040), (1056, 128)],
    dtype=HALVES,
)
def test_fp8_scaled_mm(dtype, shape, tokens, kind, rng):
    n, k = shape
    a = fp8((tokens, k), rng, gap=16)
    b = fp8((n, k), rng, gap=32).t()
    row = kind != "tensor"
    sa = scales((tokens, 1) if row else (1,), rng)
    sb = scales((1, n) if row else (1,), rng)
    bias = spread((n,), dtype, rng) if kind == "row and bias" else None
    out = guarded((tokens, n), dtype, gap=8)
    got = rk.fp8_scaled_mm(a, b, sa, sb, str(dtype).removeprefix("torch."), bias, out=out.view)
    assert got is out.view
    out.check()
    expected = exact(a, b, sa, sb, bias)
    assert_close("fp8_scaled_mm", out.view, expected, FP8[dtype])
    assert_close(
        "fp8_scaled_mm",
        rk.reference.fp8_scaled_mm(a, b, sa, sb, torch.float64, bias),
        expected,
        (1e-12, 1e-12),
    )
    assert_same_bits(rk.fp8_scaled_mm(a, b, sa, sb, dtype, bias, static_weight=True), out.view)


def blockwise(a, b, sa, sb):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for i in range(a.shape[1] // 128):
        piece = slice(i * 128, i * 128 + 128)
        columns = sb[i].double().repeat_interleave(128)
        total += (a[:, piece].double() @ b[piece].double()) * sa[:, i : i + 1].double() * columns
    return total


@pytest.mark.combinations(
    columns=[False, True],
    tokens=[0, 1, 16, 17, 33, 64, 65, 129, 300],
    shape=[(128, 128), (384, 256), (1152, 1024)],
)
def test_fp8_blockwise_scaled_mm(shape, tokens, columns, rng):
    n, k = shape
    a = fp8((tokens, k), rng, gap=16)
    b = fp8((n, k), rng).t()
    sa = scales((k // 128, tokens), rng).t() if columns else scales((tokens, k // 128), rng)
    sb = scales((n // 128, k // 128), rng).t()
    out = guarded((tokens, n), torch.bfloat16, gap=8)
    assert rk.fp8_blockwise_scaled_mm(a, b, sa, sb, out=out.view) is out.view
    out.check()
    expected = blockwise(a, b, sa, sb)
    assert_close("fp8_blockwise_scaled_mm", out.view, expected, FP8[torch.bfloat16])
    exact = rk.reference.fp8_blockwise_scaled_mm(a, b, sa, sb, torch.float64)
    assert_close("fp8_blockwise_scaled_mm", exact, expected, (1e-12, 1e-12))
    assert_same_bits(rk.fp8_blockwise_scaled_mm(a, b, sa, sb, torch.bfloat16), out.view)


# On 132 multiprocessors: tiles of 64, 96, 128, 160 and 192 rows, two blocks that share k, and tiles
# of 256 tokens (more than one band, clusters with one tile and with two).
@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [
        (300, 1152, 640),
        (1800, 1280, 640),
        (130, 8448, 640),
        (130, 10240, 640),
        (130, 12672, 640),
        (100, 512, 2048),
        (2200, 1280, 640),
        (2250, 3456, 640),
    ],
)
def test_fp8_of_every_tile(tokens, n, k, rng, request):
    if not on_gpu(request):
        pytest.skip("the CPU has no tiles")
    a = fp8((tokens, k), rng)
    b = fp8((n, k), rng).t()
    sa = scales((tokens, 1), rng)
    sb = scales((1, n), rng)
    got = rk.fp8_scaled_mm(a, b, sa, sb)
    assert_close("fp8_scaled_mm", got, exact(a, b, sa, sb), FP8[torch.bfloat16])
    assert_same_bits(rk.fp8_scaled_mm(a[:-3], b, sa[:-3], sb), got[:-3])
    ba = scales((tokens, k // 128), rng)
    bb = scales((n // 128, k // 128), rng).t()
    got = rk.fp8_blockwise_scaled_mm(a, b, ba, bb)
    assert_close("fp8_blockwise_scaled_mm", got, blockwise(a, b, ba, bb), FP8[torch.bfloat16])
    assert_same_bits(rk.fp8_blockwise_scaled_mm(a[:-3], b, ba[:-3], bb), got[:-3])


@pytest.mark.parametrize("tokens", [130, 192, 300])
@pytest.mark.parametrize("fast", [False, True])
def test_tiles_that_a_warpgroup_has_no_rows_of(tokens, fast, rng, request):
    """Their stages are written while the results of the tile before still leave: the same bits
    every time."""
    if not on_gpu(request):
        pytest.skip("the CPU has no tiles")
    a = fp8((tokens, 128), rng)
    b = fp8((33792, 128), rng).t()
    sa = scales((tokens, 1), rng)
    sb = scales((1, 33792), rng)
    first = rk.fp8_scaled_mm(a, b, sa, sb, fast_accum=fast)
    assert_close("fp8_scaled_mm", first, exact(a, b, sa, sb), FP8[torch.bfloat16])
    for _ in range(20):
        assert_same_bits(rk.fp8_scaled_mm(a, b, sa, sb, fast_accum=fast), first)


# On 132 multiprocessors: tiles of 64, 96, 128, 192, 224 and 256 rows; odd numbers of tiles of
# tokens.
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [
        (1, 48, 272),
        (129, 48, 272),
        (300, 1152, 1024),
        (257, 6144, 256),
        (140, 8448, 256),
        (140, 12672, 384),
        (140, 14784, 640),
        (260, 16896, 512),
        (150, 256, 16384),
    ],
)
def test_fp8_fast_accum(dtype, tokens, n, k, rng, request):
    a = fp8((tokens, k), rng, gap=16)
    b = fp8((n, k), rng).t()
    sa = scales((tokens, 1), rng)
    sb = scales((1, n), rng)
    bias = spread((n,), dtype, rng)
    out = guarded((tokens, n), dtype, gap=8)
    assert rk.fp8_scaled_mm(a, b, sa, sb, dtype, bias, fast_accum=True, out=out.view) is out.view
    out.check()
    bound = next(bound for most, bound in FAST.items() if k <= most)
    assert_close("fp8_scaled_mm, fast_accum", out.view, exact(a, b, sa, sb, bias), bound[dtype])
    assert_same_bits(
        rk.fp8_scaled_mm(a, b, sa, sb, dtype, bias, fast_accum=True, static_weight=True), out.view
    )
    if on_gpu(request) and tokens > 131:
        fewer = rk.fp8_scaled_mm(a[:-3], b, sa[:-3], sb, dtype, bias, fast_accum=True)
        assert_same_bits(fewer, out.view[:-3])


@pytest.mark.parametrize("tokens", [0, 1, 16, 40, 70, 257])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_bmm_fp8(tokens, batch, rng):
    n = 144
    k = 272
    a = fp8((batch, tokens, k), rng, gap=16)
    b = fp8((batch, n, k), rng).transpose(1, 2)
    sa = scales((1,), rng)
    sb = scales((), rng)
    expected = a.double() @ b.double() * (sa.double() * sb.double())
    assert_close("bmm_fp8", rk.bmm_fp8(a, b, sa, sb), expected, FP8[torch.bfloat16])
    assert_close(
        "bmm_fp8", rk.reference.bmm_fp8(a, b, sa, sb, torch.float64), expected, (1e-12, 1e-12)
    )
    assert rk.bmm_fp8(a, b, sa, sb, torch.float16).dtype == torch.float16


@pytest.mark.parametrize("bounds", [(1, 16), (17, 64), (65, 128), (129, 300)], ids=str)
def test_fp8_rows_do_not_depend_on_the_others(bounds, rng, request):
    if not on_gpu(request):
        pytest.skip("torch's product on the CPU promises no such thing")
    low, high = bounds
    a = fp8((high, 512), rng)
    b = fp8((256, 512), rng).t()
    sa = scales((high, 4), rng)
    sb = scales((2, 4), rng).t()
    whole = rk.fp8_blockwise_scaled_mm(a, b, sa, sb)
    assert_same_bits(rk.fp8_blockwise_scaled_mm(a[:low], b, sa[:low], sb), whole[:low])
