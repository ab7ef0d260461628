"""What the tests of products share: FP8 and INT8 inputs, scales, the oracle, tolerances."""

from __future__ import annotations

import math

import torch

from tests.kernel.helpers import spread

HALVES = [torch.bfloat16, torch.float16]
INT8_KINDS = ["tensor", "row", "row and bias", "zero points", "one zero point and float bias"]
# The tensor cores keep about 14 bits of a sum of 128 FP8 products.
FP8 = {torch.float16: (1.2e-3, 6e-3), torch.bfloat16: (4.5e-3, 9e-3)}


def on_gpu(request) -> bool:
    return request.config.getoption("--device") != "cpu"


def fp8(shape, rng, *, gap: int = 0) -> torch.Tensor:
    """Random e4m3 numbers in rows that `gap` NaNs keep apart."""
    values = (torch.randn(tuple(shape), generator=rng) * 4).to(torch.float8_e4m3fn)
    if not gap:
        return values
    rows = math.prod(shape[:-1])
    width = shape[-1]
    buffer = torch.full((rows, width + gap), 0x7F, dtype=torch.uint8)
    buffer[:, :width] = values.view(torch.uint8).view(rows, width)
    view = buffer.view(torch.float8_e4m3fn)[:, :width]
    return view if len(shape) == 2 else view.unflatten(0, shape[:-1])


def int8(shape, rng, *, gap: int = 0) -> torch.Tensor:
    """Random codes, all 256 of them, in rows that `gap` foreign codes keep apart."""
    rows, width = shape
    buffer = torch.randint(-128, 128, (rows, width + gap), generator=rng, dtype=torch.int8)
    return buffer[:, :width]


def scales(shape, rng) -> torch.Tensor:
    return torch.rand(shape, generator=rng) + 0.25


def exact(a, b, sa, sb, bias=None, azp=None) -> torch.Tensor:
    """The product in float64, which holds every sum of codes exactly."""
    codes = a.double() if azp is None else a.double() - azp.double().reshape(-1, 1)
    result = (codes @ b.double()) * (sa.double().reshape(-1, 1) * sb.double().reshape(1, -1))
    return result if bias is None else result + bias.double()


def zero_points(rows, rng) -> torch.Tensor:
    return torch.randint(-128, 128, (rows, 1), generator=rng, dtype=torch.int32)


def column_sums(b) -> torch.Tensor:
    return b.sum(0, dtype=torch.int32)


def int8_operands(dtype, shape, tokens, kind, rng):
    """mat_a [tokens, k] and mat_b [k, n] of a shape (n, k), their scales, bias or None, and zero
    points or None, as `kind` says."""
    n, k = shape
    a = int8((tokens, k), rng, gap=16)
    b = int8((n, k), rng, gap=32).t()
    row = kind != "tensor"
    sa = scales((tokens, 1) if row else (1,), rng) / 2**8  # float16 holds the results
    sb = scales((1, n) if row else (1,), rng)
    bias = None
    if "bias" in kind:
        bias = spread((n,), torch.float32 if "float" in kind else dtype, rng)
    azp = None
    if "zero" in kind:
        azp = zero_points(1 if "one" in kind else tokens, rng)
    return a, b, sa, sb, bias, azp
