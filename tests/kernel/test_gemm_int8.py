"""INT8 products: exact sums, scales of tensors and rows, zero points, bits, borders."""

from __future__ import annotations

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _loader
from tests.kernel.gemm_cases import (
    HALVES,
    INT8_KINDS,
    column_sums,
    exact,
    int8,
    int8_operands,
    on_gpu,
    scales,
    zero_points,
)  # fmt: skip
from tests.kernel.helpers import ROUNDED_ONCE, assert_close, assert_same_bits, guarded, spread

pytestmark = pytest.mark.cover("values")

MOST = 131056  # columns of mat_a
MOST_SHIFTED = 65792


@pytest.mark.combinations(
    kind=INT8_KINDS,
    tokens=[0, 1, 9, 16, 33, 64, 65, 127, 128, 129, 300],
    shape=[(16, 16), (48, 272), (272, 1040), (1056, 128), (2128, 1040)],
    dtype=HALVES,
)
def test_int8_scaled_mm(dtype, shape, tokens, kind, rng):
    a, b, sa, sb, bias, azp = int8_operands(dtype, shape, tokens, kind, rng)
    n = shape[0]
    options = {} if azp is None else {"azp": azp, "b_sums": column_sums(b)}
    out = guarded((tokens, n), dtype, gap=8)
    name = str(dtype).removeprefix("torch.")
    assert rk.int8_scaled_mm(a, b, sa, sb, name, bias, out=out.view, **options) is out.view
    out.check()
    expected = exact(a, b, sa, sb, bias, azp)
    assert_close("int8_scaled_mm", out.view, expected, ROUNDED_ONCE[dtype])
    reference = rk.reference.int8_scaled_mm(a, b, sa, sb, torch.float64, bias, **options)
    assert_close("int8_scaled_mm", reference, expected, (1e-12, 1e-12))
    again = rk.int8_scaled_mm(a, b, sa, sb, dtype, bias, static_weight=True, **options)
    assert_same_bits(again, out.view)


# On 132 multiprocessors, of tiles that share the weight's rows: 64, 128, 192, 224 and 256 rows, one
# and two for a cluster, odd numbers of tiles of tokens; of tiles that share tokens (up to 128): 64,
# 96, 128, 192, 224 and 256; of blocks that share k, two and four.
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [
        (300, 1152, 640),
        (140, 8448, 256),
        (257, 6144, 272),
        (140, 14784, 384),
        (260, 16896, 272),
        (2250, 3472, 272),
        (128, 8448, 640),
        (127, 12672, 272),
        (65, 16896, 256),
        (100, 25344, 256),
        (128, 29568, 256),
        (66, 33808, 144),
        (100, 512, 2048),
        (17, 272, 8192),
        (9, 272, 8192),
        (33, 4096, 1024),
        (64, 34048, 272),
        (31, 21136, 272),
    ],
)
def test_every_tile(tokens, n, k, shifted, dtype, rng, request):
    if not on_gpu(request):
        pytest.skip("the CPU has no tiles")
    a = int8((tokens, k), rng)
    b = int8((n, k), rng).t()
    sa = scales((tokens, 1), rng) / 2**8
    sb = scales((1, n), rng)
    bias = spread((n,), dtype, rng)
    azp = zero_points(tokens, rng) if shifted else None
    sums = column_sums(b) if shifted else None
    out = guarded((tokens, n), dtype, gap=8)
    rk.int8_scaled_mm(a, b, sa, sb, dtype, bias, azp=azp, b_sums=sums, out=out.view)
    out.check()
    assert_close("int8_scaled_mm", out.view, exact(a, b, sa, sb, bias, azp), ROUNDED_ONCE[dtype])
    fewer = tokens - 3
    fewer_azp = None if azp is None else azp[:fewer]
    again = rk.int8_scaled_mm(a[:fewer], b, sa[:fewer], sb, dtype, bias, azp=fewer_azp, b_sums=sums)
    if (fewer <= 64) == (tokens <= 64):
        assert_same_bits(again, out.view[:fewer])


@pytest.mark.parametrize("tokens", [130, 192, 300])
def test_tiles_that_a_warpgroup_has_no_rows_of(tokens, rng, request):
    """Their stages are written while the results of the tile before still leave: the same bits
    every time."""
    if not on_gpu(request):
        pytest.skip("the CPU has no tiles")
    a = int8((tokens, 128), rng)
    b = int8((33792, 128), rng).t()
    sa = scales((tokens, 1), rng)
    sb = scales((1, 33792), rng)
    first = rk.int8_scaled_mm(a, b, sa, sb)
    assert_close("int8_scaled_mm", first, exact(a, b, sa, sb), ROUNDED_ONCE[torch.bfloat16])
    for _ in range(20):
        assert_same_bits(rk.int8_scaled_mm(a, b, sa, sb), first)


@pytest.mark.parametrize("tokens", [3, 40, 70, 130])
@pytest.mark.parametrize("n", [16, 272])
def test_the_largest_sums(tokens, n, rng):
    """Codes of -128 and 127 over the most columns: no sum wraps, and none is rounded before its
    scale."""
    low = torch.full((tokens, MOST), -128, dtype=torch.int8)
    low[1] = 127
    b = torch.full((n, MOST), -128, dtype=torch.int8)
    b[n // 2 :, ::2] = 127
    b[-1, -1] = 3
    sa = scales((tokens, 1), rng)
    sb = scales((1, n), rng) / 2**20
    got = rk.int8_scaled_mm(low, b.t(), sa, sb, torch.float16)
    expected = exact(low, b.t(), sa, sb)
    assert expected.abs().max() < 65504
    assert_close("int8_scaled_mm", got, expected, ROUNDED_ONCE[torch.float16])


@pytest.mark.parametrize("tokens", [2, 70, 130])
def test_the_largest_differences(tokens, rng):
    a = torch.full((tokens, MOST_SHIFTED), -128, dtype=torch.int8)
    azp = torch.full((tokens,), 127, dtype=torch.int32)
    a[0] = 127
    azp[0] = -128
    b = torch.full((32, MOST_SHIFTED), -128, dtype=torch.int8).t()
    b[:, 5] = 127
    one = torch.full((1,), 2.0**-16)
    got = rk.int8_scaled_mm(a, b, one, torch.ones(1), torch.float16, azp=azp, b_sums=column_sums(b))
    expected = exact(a, b, one, torch.ones(1), azp=azp)
    assert_close("int8_scaled_mm", got, expected, ROUNDED_ONCE[torch.float16])


@pytest.mark.parametrize("tokens", [5, 60, 100, 200])
def test_small_differences_of_large_sums(tokens, rng):
    """What stays when a zero point is taken off is far below what float32 keeps of the sum."""
    a = torch.full((tokens, 16384), 127, dtype=torch.int8)
    a[:, 3] = 126
    b = torch.full((48, 16384), 127, dtype=torch.int8).t()
    b[3] = torch.arange(1, 49, dtype=torch.int8)
    azp = torch.full((tokens, 1), 127, dtype=torch.int32)
    one = torch.ones(1)
    got = rk.int8_scaled_mm(a, b, one, one, azp=azp, b_sums=column_sums(b))
    assert torch.equal(got.float(), -torch.arange(1.0, 49.0).expand(tokens, 48))


def test_a_product_with_ones_is_every_code():
    codes = torch.arange(-128, 128, dtype=torch.int8).view(16, 16)
    one = torch.eye(16, dtype=torch.int8).t()
    unit = torch.ones(1)
    assert torch.equal(rk.int8_scaled_mm(codes, one, unit, unit).float(), codes.float())


@pytest.mark.parametrize("bounds", [(1, 64), (65, 300)], ids=str)
@pytest.mark.parametrize("n", [256, 4096])
def test_rows_do_not_depend_on_the_others(bounds, n, rng, request):
    if not on_gpu(request):
        pytest.skip("torch's product on the CPU promises no such thing")
    low, high = bounds
    a = int8((high, 4096), rng)
    b = int8((n, 4096), rng).t()
    sa = scales((high, 1), rng)
    sb = scales((n,), rng)
    bias = spread((n,), torch.float32, rng)
    whole = rk.int8_scaled_mm(a, b, sa, sb, bias=bias)
    assert_same_bits(rk.int8_scaled_mm(a[:low], b, sa[:low], sb, bias=bias), whole[:low])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("gate", [1, 2])
@pytest.mark.parametrize("tokens", [1, 17, 64, 65, 200])
def test_gated_products_of_the_binding(tokens, gate, dtype, rng, request):
    """Silu(gate) times up, where gate and up rows are halves of the weight or neighbours."""
    if not on_gpu(request) or _loader.backend != "cuda":
        pytest.skip("a kernel of Hopper alone has them")
    a = int8((tokens, 272), rng)
    w = int8((544, 272), rng)
    sa = scales((tokens, 1), rng) / 2**14
    sb = scales((544,), rng)
    out = torch.full((tokens, 272), torch.nan, dtype=dtype, device="cuda")
    there = [x.cuda() for x in (a, w, sa, sb)]
    there[1] = there[1].t()
    _loader.bind.int8_scaled_mm(*there, None, None, None, gate, False, out)
    both = exact(a, w.t(), sa, sb)
    first, second = both.chunk(2, -1) if gate == 1 else (both[:, ::2], both[:, 1::2])
    expected = torch.nn.functional.silu(first) * second
    assert_close("int8_scaled_mm, gated", out.cpu(), expected, ROUNDED_ONCE[dtype])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"mat_a": torch.ones(2, 32)}, TypeError, "mat_a"),
        ({"mat_a": torch.ones(2, 32).to(torch.uint8)}, TypeError, "mat_a"),
        ({"mat_b": torch.ones(32, 16)}, TypeError, "mat_b"),
        ({"mat_b": torch.ones(32, 16, dtype=torch.int8)}, ValueError, "column-major"),
        ({"mat_b": torch.ones(16, 48, dtype=torch.int8).t()}, ValueError, "mat_b"),
        ({"mat_b": torch.ones(15, 32, dtype=torch.int8).t()}, ValueError, "mat_b"),
        ({"mat_a": torch.ones(2, 40, dtype=torch.int8)[:, :32]}, ValueError, "mat_a.*16 bytes"),
        ({"mat_a": torch.ones(2, 24, dtype=torch.int8)}, ValueError, "mat_a"),
        ({"mat_a": torch.ones(32, dtype=torch.int8)}, ValueError, "mat_a"),
        ({"scales_a": torch.ones(3)}, ValueError, "scales_a"),
        ({"scales_b": torch.ones(16).double()}, TypeError, "scales_b"),
        ({"out": torch.ones(2, 17).bfloat16()}, ValueError, "out"),
        ({"out": torch.ones(2, 16)}, TypeError, "out"),
        ({"out_dtype": "float32"}, TypeError, "dtype"),
        ({"bias": torch.ones(15).bfloat16()}, ValueError, "bias"),
        ({"bias": torch.ones(16).half()}, TypeError, "bias"),
        ({"azp": torch.ones(2, dtype=torch.int32)}, ValueError, "azp and b_sums"),
        ({"b_sums": torch.ones(16, dtype=torch.int32)}, ValueError, "azp and b_sums"),
        (
            {"azp": torch.ones(2, dtype=torch.int8), "b_sums": torch.ones(16, dtype=torch.int32)},
            TypeError,
            "azp",
        ),
        (
            {"azp": torch.ones(3, dtype=torch.int32), "b_sums": torch.ones(16, dtype=torch.int32)},
            ValueError,
            "azp",
        ),
        (
            {"azp": torch.ones(2, dtype=torch.int32), "b_sums": torch.ones(16)},
            TypeError,
            "b_sums",
        ),
        (
            {"azp": torch.ones(2, dtype=torch.int32), "b_sums": torch.ones(8, dtype=torch.int32)},
            ValueError,
            "b_sums",
        ),
    ],
)
def test_errors_name_the_argument(change, error, text):
    ones = torch.ones(16, 32, dtype=torch.int8)
    args = {
        "mat_a": ones[:2],
        "mat_b": ones.t(),
        "scales_a": torch.ones(2),
        "scales_b": torch.ones(16),
    } | change
    with pytest.raises(error, match=text):
        rk.int8_scaled_mm(**args)


@pytest.mark.parametrize("shifted", [False, True])
def test_sums_that_32_bits_do_not_hold(shifted):
    k = (MOST_SHIFTED if shifted else MOST) + 16
    a = torch.ones(1, k, dtype=torch.int8)
    b = torch.ones(16, k, dtype=torch.int8).t()
    one = torch.ones(1)
    options = {}
    if shifted:
        options = {"azp": torch.ones(1, dtype=torch.int32), "b_sums": column_sums(b)}
    with pytest.raises(ValueError, match=f"mat_a has {k} columns"):
        rk.int8_scaled_mm(a, b, one, one, **options)
