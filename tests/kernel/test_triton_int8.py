"""INT8 products in Triton against float64: in its interpreter, or on the GPU that is there."""

from __future__ import annotations

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _dispatch, _loader
from tests.kernel.gemm_cases import int8, scales
from tests.kernel.helpers import assert_close, guarded, spread
from tests.kernel.triton_device import DEVICE, need_triton

need_triton()

# The interpreter cuts to bfloat16.
TOLERANCE = {torch.float16: (4.9e-4, 5.2e-4), torch.bfloat16: (8e-3, 1.6e-2)}

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


def there(x: torch.Tensor) -> torch.Tensor:
    """On the device, with what lies between its rows."""
    if DEVICE == "cpu":
        return x
    base = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return base.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())


def exact(a, b, sa, sb, bias=None, azp=None) -> torch.Tensor:
    codes = a.double() if azp is None else a.double() - azp.double().reshape(-1, 1)
    result = (codes @ b.double()) * (sa.double().reshape(-1, 1) * sb.double().reshape(1, -1))
    return result if bias is None else result + bias.double()


# Rows: none, one, odd numbers, around the tiles; columns and K with and without a tail.
@pytest.mark.parametrize(
    "shape", [(0, 48, 32), (1, 16, 16), (7, 144, 272), (33, 80, 128), (131, 272, 144)], ids=str
)
@pytest.mark.parametrize("kind", ["tensor", "row", "row and bias", "row and float bias"])
@pytest.mark.parametrize("zeros", ["", "of all", "of rows"])
def test_scaled(shape, kind, zeros, rng):
    rows, n, k = shape
    to = torch.bfloat16 if kind == "row" else torch.float16
    a = int8((rows, k), rng, gap=16)
    b = int8((n, k), rng, gap=32).t()
    row = kind != "tensor"
    sa = scales((rows, 1) if row else (1,), rng) / 64
    sb = scales((1, n) if row else (), rng)
    bias = None
    if "bias" in kind:
        bias = spread((n,), torch.float32 if "float" in kind else to, rng)
    azp = sums = None
    if zeros:
        azp = torch.randint(-128, 128, (1 if zeros == "of all" else rows,), generator=rng)
        azp = azp.int()
        sums = b.sum(0, dtype=torch.int32)
    out = guarded((rows, n), to, gap=8)
    given = [None if x is None else there(x) for x in (a, b, sa, sb, bias, azp, sums)]
    target = there(out.view)
    rk.int8_scaled_mm(*given[:4], to, given[4], azp=given[5], b_sums=given[6], out=target)
    if DEVICE != "cpu":
        out.view.copy_(target)
    out.check()
    assert_close("int8_scaled_mm", out.view, exact(a, b, sa, sb, bias, azp), TOLERANCE[to])


def test_the_largest_sums():
    """No sum wraps; K is the most that is taken."""
    a = there(torch.full((2, 131056), -128, dtype=torch.int8))
    b = there(torch.full((16, 131056), -128, dtype=torch.int8)).t()
    unit = there(torch.ones(1))
    got = rk.int8_scaled_mm(a, b, unit / 2**16, unit, torch.float16)
    assert torch.equal(got.cpu(), torch.full((2, 16), 131056 / 4, dtype=torch.float16))


def test_sums_that_32_bits_do_not_hold():
    a = there(torch.ones(1, 131072, dtype=torch.int8))
    unit = there(torch.ones(1))
    with pytest.raises(ValueError, match="mat_a has 131072 columns"):
        rk.int8_scaled_mm(a, a.expand(16, -1).contiguous().t(), unit, unit)


def test_a_gpu_without_a_kernel_is_served_by_triton():
    assert _dispatch.describe("int8_scaled_mm", "cuda", "int8")[0] == "triton"
