"""FP8 products of more than 1,024 tokens, whose tiles have 256: every end of theirs, and the bits
of smaller tiles."""

from __future__ import annotations

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import assert_close, assert_same_bits, guarded, spread

HALVES = [torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn
# As test_gemm.py: the tensor cores keep about 14 bits of a sum of 128 products.
TOLERANCE = {torch.float16: (1.2e-3, 6e-3), torch.bfloat16: (4.5e-3, 9e-3)}
# On 132 multiprocessors tiles of 256 tokens, one, two or three for a cluster; 1,025 tokens leave
# the second half of the last one empty, n ends within a tile, and k within its first 128 or later.
SHAPES = [
    (1025, 4624, 128),
    (2200, 1296, 96),
    (2250, 3456, 16),
    (2250, 3472, 272),
    (1025, 8464, 272),
    (2250, 3472, 640),
]
BATCHES = [(2, 1100, 1296, 640), (2, 1025, 4624, 128), (2, 2200, 1296, 272)]
BLOCKS = [(1025, 4608, 128), (2250, 3456, 256), (2200, 1280, 640)]


def on_gpu(request) -> bool:
    return request.config.getoption("--device") != "cpu"


def sized(shape: tuple[int, ...], request) -> tuple[int, ...]:
    """On the CPU, which has no tiles, the calls are checked with few rows."""
    if on_gpu(request):
        return shape
    if shape not in (SHAPES[0], BLOCKS[0], BATCHES[0]):
        pytest.skip("the CPU has no tiles")
    return (*shape[:-3], 70, 256, 128)


def operands(m: int, n: int, k: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = ((torch.randn(rows, k, generator=rng) * 4).to(FP8) for rows in (m, n))
    return a, b.t()


def scales(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=rng) + 0.25


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias", ["", "of the result's type", "of float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_of_rows(shape, bias, dtype, rng, request):
    m, n, k = sized(shape, request)
    (a, b) = operands(m, n, k, rng)
    sa = scales((m, 1), rng)
    sb = scales((1, n), rng)
    more = spread((n,), torch.float32 if "float32" in bias else dtype, rng) if bias else None
    expected = (a.double() @ b.double()) * (sa.double() * sb.double())
    expected = expected if more is None else expected + more.double()
    out = guarded((m, n), dtype, gap=8)
    assert rk.fp8_scaled_mm(a, b, sa, sb, dtype, more, out=out.view) is out.view
    out.check()
    assert_close("fp8_scaled_mm", out.view, expected, TOLERANCE[dtype])
    assert_same_bits(rk.fp8_scaled_mm(a, b, sa, sb, dtype, more, static_weight=True), out.view)
    if not on_gpu(request):
        return
    for fewer in (m - 3, 1024, 1023, 700, 129):  # tiles of 256 tokens and of 128
        assert_same_bits(
            rk.fp8_scaled_mm(a[:fewer], b, sa[:fewer], sb, dtype, more), out.view[:fewer]
        )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", BLOCKS, ids=str)
def test_scales_of_blocks(shape, dtype, rng, request):
    m, n, k = sized(shape, request)
    (a, b) = operands(m, n, k, rng)
    sa = scales((m, k // 128), rng)
    sb = scales((n // 128, k // 128), rng)
    wide = a.double() * sa.double().repeat_interleave(128, 1)
    expected = wide @ (
        b.double() * sb.double().repeat_interleave(128, 0).repeat_interleave(128, 1).t()
    )
    out = guarded((m, n), dtype, gap=8)
    rk.fp8_blockwise_scaled_mm(a, b, sa, sb.t(), dtype, out=out.view)
    out.check()
    assert_close("fp8_blockwise_scaled_mm", out.view, expected, TOLERANCE[dtype])
    again = rk.fp8_blockwise_scaled_mm(a, b, sa, sb.t(), dtype, static_weight=True)
    assert_same_bits(again, out.view)
    if not on_gpu(request):
        return
    for fewer in (m - 3, 1024, 1023, 700, 129):
        assert_same_bits(
            rk.fp8_blockwise_scaled_mm(a[:fewer], b, sa[:fewer], sb.t(), dtype), out.view[:fewer]
        )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", BATCHES, ids=str)
def test_batches(shape, dtype, rng, request):
    """A batch's last tile of tokens is followed by the next one's first."""
    batch, m, n, k = sized(shape, request)
    a, b = ((torch.randn(batch, rows, k, generator=rng) * 4).to(FP8) for rows in (m, n))
    sa = scales((1,), rng)
    sb = scales((), rng)
    got = rk.bmm_fp8(a, b.mT, sa, sb, dtype)
    assert_close(
        "bmm_fp8", got, a.double() @ b.double().mT * (sa.double() * sb.double()), TOLERANCE[dtype]
    )
    if on_gpu(request):
        assert_same_bits(rk.bmm_fp8(a[1:], b[1:].mT, sa, sb, dtype), got[1:])
        assert_same_bits(rk.bmm_fp8(a[:, :1000], b.mT, sa, sb, dtype), got[:, :1000])
