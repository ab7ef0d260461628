"""FP8 products in Triton against float64: in its interpreter, or on the GPU that is there."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _dispatch, _loader
from tests.kernel.helpers import assert_close, assert_same_bits, guarded, spread
from tests.kernel.triton_device import DEVICE, need_triton

need_triton()

FN = torch.float8_e4m3fn
FNUZ = torch.float8_e4m3fnuz
NAN = {FN: 0x7F, FNUZ: 0x80}
# The interpreter cuts to bfloat16.
TOLERANCE = {
    torch.float16: (1.2e-3, 6e-3),
    torch.bfloat16: (8e-3, 1.6e-2),
}

pytestmark = [
    pytest.mark.cover("values"),
    pytest.mark.cpu_only,  # `--device` moves the public ops alone
]


@pytest.fixture(autouse=True)
def _through_triton(monkeypatch):
    """The public ops choose as on a GPU that the library has no kernel for."""
    monkeypatch.setattr(_loader, "bind", None)
    monkeypatch.setattr(_dispatch, "_GPUS", ("cpu", "cuda", "rocm"))
    rk.set_fallback("error")
    _dispatch.choose_anew()
    yield
    _dispatch.choose_anew()


def fp8(shape, dtype, rng, gap: int = 0) -> torch.Tensor:
    """Random numbers in rows that `gap` NaNs keep apart."""
    buffer = torch.full((math.prod(shape[:-1]), shape[-1] + gap), NAN[dtype], dtype=torch.uint8)
    values = (torch.randn(tuple(shape), generator=rng) * 4).to(dtype)
    buffer[:, : shape[-1]] = values.view(torch.uint8).flatten(0, -2)
    return buffer.to(DEVICE).view(dtype)[:, : shape[-1]].unflatten(0, shape[:-1])


def scales(shape, rng) -> torch.Tensor:
    return (torch.rand(shape, generator=rng) + 0.25).to(DEVICE)


def result(shape, dtype):
    """Room for a result, and what gives it back after a check that nothing else was written."""
    out = guarded(shape, dtype, gap=8)
    there = (
        out.view
        if DEVICE == "cpu"
        else out._buffer.to(DEVICE).as_strided(shape, out.view.stride(), 32)
    )

    def back() -> torch.Tensor:
        out.view.copy_(there)
        out.check()
        return out.view

    return there, back


@pytest.mark.parametrize("dtype", [FN, FNUZ], ids=str)
def test_every_number_is_widened_exactly(dtype):
    """A product with ones on the diagonal; float16 holds every number of both formats."""
    from radix_kernels.triton import fp8_gemm

    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(16, 16)
    codes = torch.where(codes.view(dtype).float().isnan(), 0, codes)  # a NaN would fill its row
    one = torch.eye(16, device=DEVICE).to(dtype)
    out = torch.empty(16, 16, dtype=torch.float16, device=DEVICE)
    unit = torch.ones(1, device=DEVICE)
    fp8_gemm.run(
        codes.view(dtype), one.t(), unit, unit, None, out, (0, 0, 0, 0), blocks=False, widen=True
    )
    assert torch.equal(out.float(), codes.view(dtype).float())
    codes[3, 3] = NAN[dtype]
    fp8_gemm.run(
        codes.view(dtype), one.t(), unit, unit, None, out, (0, 0, 0, 0), blocks=False, widen=True
    )
    assert torch.isnan(out[3]).all() and not torch.isnan(out[[*range(3), *range(4, 16)]]).any()


# Rows: none, one, odd numbers, around the tiles; columns and K with and without a tail.
@pytest.mark.parametrize("dtype", [FN, FNUZ], ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 48, 32), (1, 16, 16), (7, 144, 272), (33, 80, 128), (131, 272, 144)], ids=str
)
@pytest.mark.parametrize("kind", ["tensor", "row", "row and bias", "row and float bias"])
def test_scaled(dtype, shape, kind, rng):
    rows, n, k = shape
    to = torch.bfloat16 if kind == "row" else torch.float16
    a = fp8((rows, k), dtype, rng, 16)
    b = fp8((n, k), dtype, rng, 32).t()
    row = kind != "tensor"
    sa = scales((rows, 1) if row else (1,), rng)
    sb = scales((1, n) if row else (), rng)
    bias = (
        spread((n,), torch.float32 if "float" in kind else to, rng).to(DEVICE)
        if "bias" in kind
        else None
    )
    out, back = result((rows, n), to)
    assert rk.fp8_scaled_mm(a, b, sa, sb, to, bias, out=out) is out
    exact = (a.double() @ b.double()) * (sa.double().reshape(-1, 1) * sb.double().reshape(1, -1))
    exact = exact if bias is None else exact + bias.double()
    assert_close("fp8_scaled_mm", back(), exact.cpu(), TOLERANCE[to])


@pytest.mark.parametrize("widen", [False, True])
def test_a_format_that_the_chip_knows_gives_what_its_float16_gives(widen, rng):
    from radix_kernels.triton import fp8_gemm

    a = fp8((20, 160), FN, rng)
    b = fp8((48, 160), FN, rng).t()
    one = torch.ones(1, device=DEVICE)
    if not widen and not fp8_gemm.multiplies(a.device, FN):
        pytest.skip("this GPU multiplies no e4m3fn")
    out = torch.empty(20, 48, dtype=torch.float16, device=DEVICE)
    fp8_gemm.run(a, b, one * 0.1, one, None, out, (0, 0, 0, 0), blocks=False, widen=widen)
    assert_close(
        "fp8_scaled_mm", out, (a.double() @ b.double() * 0.1).cpu(), TOLERANCE[torch.float16]
    )


@pytest.mark.parametrize("dtype", [FN, FNUZ], ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 128, 128), (1, 128, 256), (19, 384, 256), (130, 128, 384)], ids=str
)
@pytest.mark.parametrize("columns", [False, True])
def test_block_scales(dtype, shape, columns, rng):
    rows, n, k = shape
    a = fp8((rows, k), dtype, rng, 16)
    b = fp8((n, k), dtype, rng).t()
    sa = scales((k // 128, rows), rng).t() if columns else scales((rows, k // 128), rng)
    sb = scales((n // 128, k // 128), rng).t()
    out, back = result((rows, n), torch.float16)
    rk.fp8_blockwise_scaled_mm(a, b, sa, sb, out=out)
    full = a.double() * sa.double().repeat_interleave(128, 1)
    exact = full @ (b.double() * sb.double().repeat_interleave(128, 0).repeat_interleave(128, 1))
    assert_close("fp8_blockwise_scaled_mm", back(), exact.cpu(), TOLERANCE[torch.float16])


@pytest.mark.parametrize("dtype", [FN, FNUZ], ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 3, 16, 16), (1, 5, 16, 16), (3, 0, 16, 16), (3, 37, 144, 272)], ids=str
)
def test_batched(dtype, shape, rng):
    batch, rows, n, k = shape
    a = fp8((batch, rows, k), dtype, rng, 16)
    b = fp8((batch, n, k), dtype, rng).mT
    sa = scales((1,), rng)
    sb = scales((), rng)
    got = rk.bmm_fp8(a, b, sa, sb, torch.float16)
    exact = a.double() @ b.double() * (sa.double() * sb.double())
    assert_close("bmm_fp8", got, exact.cpu(), TOLERANCE[torch.float16])


def test_matrices_further_apart_than_32_bits_count(rng):
    """A few rows of a reserved buffer."""
    far = 2**31 + 64
    buffer = torch.empty(far + 512, dtype=torch.uint8, device=DEVICE)
    a = buffer.view(FN).as_strided((2, 32), (far, 1))
    a.view(torch.uint8).copy_(fp8((2, 32), FN, rng).view(torch.uint8))
    b = fp8((16, 32), FN, rng).t()
    one = torch.ones(1, device=DEVICE)
    exact = (a.double() @ b.double()).cpu()
    assert_close(
        "fp8_scaled_mm",
        rk.fp8_scaled_mm(a, b, one, one, torch.float16),
        exact,
        TOLERANCE[torch.float16],
    )
    batched = rk.bmm_fp8(a[:, None], b.expand(2, 32, 16), one, one, torch.float16)
    assert_same_bits(batched[:, 0].cpu(), rk.fp8_scaled_mm(a, b, one, one, torch.float16).cpu())


def test_formats_are_not_mixed(rng):
    a = fp8((4, 16), FN, rng)
    b = fp8((16, 16), FNUZ, rng).t()
    one = torch.ones(1, device=DEVICE)
    with pytest.raises(TypeError, match="mat_b"):
        rk.fp8_scaled_mm(a, b, one, one)


def test_a_gpu_without_a_kernel_is_served_by_triton():
    for op in ("fp8_scaled_mm", "fp8_blockwise_scaled_mm", "bmm_fp8"):
        assert _dispatch.describe(op, "cuda")[0] == _dispatch.describe(op, "rocm")[0] == "triton"
