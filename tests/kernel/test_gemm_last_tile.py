"""Products of more rows than fill whole tiles: what lies behind the last row of x, in memory and in
what shared memory held before, reaches no result."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _choices
from tests.kernel.gemm_cases import FP8, HALVES, exact, fp8, int8, on_gpu, scales
from tests.kernel.helpers import ROUNDED_ONCE, assert_close, assert_same_bits, guarded, spread

ROUNDED = {torch.float16: (5e-4, 7e-4), torch.bfloat16: (3.95e-3, 4.3e-3)}
APART = (1.2e-2, 4e-2)  # bfloat16 gate and up, rounded on their way
ROWS = [65, 66, 72, 96, 97, 103, 127, 129, 130, 136, 144, 145, 161, 183, 191, 192]
ROWS += [193, 224, 251, 255, 257, 263, 320, 321, 385, 511, 520]
# On 132 multiprocessors: k shared by two blocks or not, tiles of 64 to 256 rows of the weight, the
# operands swapped with one warpgroup and two; k ends within 128 bytes, n within a tile.
SHAPES = [(72, 136), (1032, 2056), (4104, 1032), (5128, 2048), (2056, 520)]
# Operands swapped, one warpgroup and k shared; gated, k shared and not.
LONG = (3080, 8192)
GATED = [(72, 136), (1032, 2056), (3072, 1024), (5128, 2048)]  # results, k
# Ranges of rows within each of which a row's bits are the same.
BORDERS = (128, 192, 256)


@pytest.fixture(autouse=True)
def kernel_everywhere(monkeypatch):
    """Products that cuBLAS would run, too."""
    monkeypatch.setattr(_choices, "blas_is_ahead_of_fused", lambda *args, gated: False)


def sized(shape: tuple[int, int], rows: int, request) -> tuple[int, int]:
    """On the CPU, which has no tiles, a few small products."""
    if on_gpu(request):
        return shape
    if shape != SHAPES[0] or rows not in (65, 136, 257):
        pytest.skip("the CPU has no tiles")
    return shape


def first_rows(rows: int, k: int, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """Rows that as many as two tiles of NaNs follow in memory."""
    buffer = torch.full((rows + 256, k), math.nan, dtype=dtype)
    buffer[:rows] = spread((rows, k), dtype, rng)
    return buffer[:rows]


def poison(rows: int, shape: tuple[int, int], dtype: torch.dtype, *, gated: bool) -> None:
    """The product of NaNs by the kernel that takes so many rows: shared memory keeps what a kernel
    leaves, and so the next one finds NaNs in every row of its stages."""
    n, k = shape
    x = torch.full((rows, k), math.nan, dtype=dtype)
    w = rk.pack_weight(torch.full((n, k), math.nan, dtype=dtype))
    if gated:
        got = rk.linear_silu_and_mul(x, w)
    else:
        got = rk.linear(x, w, residual=torch.zeros(rows, n, dtype=dtype))
    assert torch.isnan(got).all()


def range_of(rows: int) -> slice:
    """Where the range of rows begins and ends that `rows` is in; of the last, at 600."""
    ends = [64, *BORDERS, 600]
    last = next(end for end in ends if rows <= end)
    return slice(ends[ends.index(last) - 1] + 1, last)


@pytest.mark.combinations(rows=ROWS, shape=SHAPES, dtype=HALVES)
def test_a_residual(dtype, shape, rows, rng, request):
    n, k = sized(shape, rows, request)
    x = first_rows(rows, k, dtype, rng)
    w = spread((n, k), dtype, rng)
    packed = rk.pack_weight(w)
    residual = spread((rows, n), dtype, rng, gap=8)
    poison(range_of(rows).stop, shape, dtype, gated=False)
    out = guarded((rows, n), dtype, gap=8)
    assert rk.linear(x, packed, residual=residual, out=out.view) is out.view
    out.check()
    expected = x.double() @ w.double().T + residual.double()
    assert_close("linear", out.view, expected, ROUNDED[dtype])
    assert_same_bits(rk.linear(x, packed, residual=residual), out.view)


@pytest.mark.parametrize("rows", [65, 129, 136, 144, 145, 161, 191, 192])
def test_a_residual_of_a_long_sum(rows, rng, request):
    if not on_gpu(request):
        pytest.skip("the CPU has no tiles")
    n, k = LONG
    dtype = torch.bfloat16
    x = first_rows(rows, k, dtype, rng)
    w = spread((n, k), dtype, rng)
    packed = rk.pack_weight(w)
    residual = spread((rows, n), dtype, rng, gap=8)
    poison(range_of(rows).stop, LONG, dtype, gated=False)
    out = guarded((rows, n), dtype, gap=8)
    rk.linear(x, packed, residual=residual, out=out.view)
    out.check()
    expected = x.double() @ w.double().T + residual.double()
    assert_close("linear", out.view, expected, ROUNDED[dtype])
    most = range_of(rows).stop
    more = torch.cat([x, spread((most - rows, k), dtype, rng)])
    ends = torch.cat([residual, spread((most - rows, n), dtype, rng)])
    assert_same_bits(rk.linear(more, packed, residual=ends)[:rows], out.view)


@pytest.mark.combinations(rows=ROWS, shape=GATED, interleaved=[False, True])
def test_a_gate(interleaved, shape, rows, rng, request):
    features, k = sized(shape, rows, request)
    dtype = torch.bfloat16
    x = first_rows(rows, k, dtype, rng)
    w = spread((2 * features, k), dtype, rng) * 0.05
    packed = rk.pack_weight(w)
    poison(range_of(rows).stop, (2 * features, k), dtype, gated=True)
    out = guarded((rows, features), dtype, gap=8)
    rk.linear_silu_and_mul(x, packed, interleaved=interleaved, out=out.view)
    out.check()
    both = x.double() @ w.double().T
    gate, up = (both[:, 0::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    tolerance = ROUNDED[dtype] if on_gpu(request) else APART
    assert_close("linear_silu_and_mul", out.view, expected, tolerance)


@pytest.mark.combinations(rows=ROWS, shape=SHAPES)
def test_bits_within_a_range(shape, rows, rng, request):
    """Of the first rows and of the last ones, which lie elsewhere in their tile."""
    if not on_gpu(request):
        pytest.skip("the CPU has no tiles")
    n, k = shape
    most = range_of(rows).stop
    x = spread((most, k), torch.bfloat16, rng)
    packed = rk.pack_weight(spread((n, k), torch.bfloat16, rng))
    residual = spread((most, n), torch.bfloat16, rng)
    whole = rk.linear(x, packed, residual=residual)
    for part in (slice(rows), slice(most - rows, most)):
        assert_same_bits(rk.linear(x[part], packed, residual=residual[part]), whole[part])


@pytest.mark.combinations(rows=[1, 7, 33, *ROWS], fast=[False, True], n=[1040, 4112])
def test_fp8(n, fast, rows, rng, request):
    n = n if on_gpu(request) else 80
    k = 1040 if on_gpu(request) else 96
    if not on_gpu(request) and rows > 200:
        pytest.skip("the CPU has no tiles")
    b = fp8((n, k), rng).t()
    sa = scales((rows, 1), rng)
    sb = scales((1, n), rng)
    behind = torch.full((rows + 256, k), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    unit = torch.ones(256, 1)
    rk.fp8_scaled_mm(behind[:256], b, unit, sb, torch.bfloat16, fast_accum=fast)
    behind.view(torch.uint8)[:rows] = fp8((rows, k), rng).view(torch.uint8)
    x = behind[:rows]
    out = guarded((rows, n), torch.bfloat16, gap=8)
    rk.fp8_scaled_mm(x, b, sa, sb, torch.bfloat16, fast_accum=fast, out=out.view)
    out.check()
    tolerance = (6e-3, 4e-2) if fast else FP8[torch.bfloat16]
    assert_close("fp8_scaled_mm", out.view, exact(x, b, sa, sb), tolerance)


@pytest.mark.combinations(rows=[1, 7, 33, *ROWS], n=[1040, 4112])
def test_int8(n, rows, rng, request):
    n = n if on_gpu(request) else 80
    k = 1040 if on_gpu(request) else 96
    if not on_gpu(request) and rows > 200:
        pytest.skip("the CPU has no tiles")
    x = int8((rows + 256, k), rng)[:rows]
    b = int8((n, k), rng).t()
    sa = scales((rows, 1), rng) / 2**8
    sb = scales((1, n), rng)
    out = guarded((rows, n), torch.bfloat16, gap=8)
    rk.int8_scaled_mm(x, b, sa, sb, torch.bfloat16, out=out.view)
    out.check()
    assert_close("int8_scaled_mm", out.view, exact(x, b, sa, sb), ROUNDED_ONCE[torch.bfloat16])
