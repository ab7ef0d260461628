"""Products with fused ends and FP8 products: against float64, bits, borders, errors."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _dispatch
from tests.kernel.helpers import assert_close, assert_same_bits, guarded, spread

HALVES = [torch.bfloat16, torch.float16]
ROUNDED = {torch.float16: (5e-4, 7e-4), torch.bfloat16: (3.95e-3, 4.3e-3)}
# torch rounds gate and up, and cuBLAS may round partial sums.
WIDE = (1e-5, 1e-4)  # float32 results: sums of tensor cores lose bits below their largest term
COMPOSED = {torch.float16: (2e-3, 6e-3), torch.bfloat16: (1.2e-2, 4e-2)}
# The tensor cores keep about 14 bits of a sum of 128 FP8 products.
FP8 = {torch.float16: (1.2e-3, 6e-3), torch.bfloat16: (4.5e-3, 9e-3)}

# Sums that the tensor cores keep over all of K: what is cut off grows with K.
FAST = {1024: FP8, 16384: {torch.float16: (5e-3, 4e-2), torch.bfloat16: (6e-3, 4e-2)}}

TOKENS = [0, 1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64]
SHAPES = [(1, 8), (8, 64), (24, 72), (100, 200), (264, 1032), (1000, 512)]
LARGE = [(6144, 1024), (1024, 4096), (34000, 256), (4096, 4096)]
# From 96 MiB on: k shared or not.
HUGE = [(12288, 4096), (24576, 2048)]


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


def scales(shape, rng) -> torch.Tensor:
    return torch.rand(shape, generator=rng) + 0.25


def oracle_linear(x, w, bias=None, residual=None):
    result = x.double() @ w.double().T
    for extra in (bias, residual):
        result = result if extra is None else result + extra.double()
    return result


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("ends", ["", "bias", "float bias", "residual", "all"])
def test_linear_with_its_ends(dtype, shape, tokens, ends, rng, request):
    n, k = shape
    x = spread((tokens, k), dtype, rng, gap=8)
    w = spread((n, k), dtype, rng)
    bias = (
        spread((n,), torch.float32 if ends == "float bias" else dtype, rng)
        if ends in ("bias", "float bias", "all")
        else None
    )
    residual = spread((tokens, n), dtype, rng, gap=3) if ends in ("residual", "all") else None
    expected = oracle_linear(x, w, bias, residual)
    fused = not on_gpu(request) or k % 8 == 0
    tolerance = ROUNDED if fused and tokens else COMPOSED
    for weight in (rk.pack_weight(w), w):
        out = guarded((tokens, n), dtype, gap=8)
        assert rk.linear(x, weight, bias, residual=residual, out=out.view) is out.view
        out.check()
        assert_close("linear", out.view, expected, tolerance[dtype])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_linear_with_a_float32_result(dtype, shape, tokens, rng):
    n, k = shape
    x = spread((tokens, k), dtype, rng, gap=8)
    w = spread((n, k), dtype, rng)
    residual = spread((tokens, n), dtype, rng, gap=3)
    out = guarded((tokens, n), torch.float32, gap=8)
    for weight in (rk.pack_weight(w), w):
        rk.linear(x, weight, residual=residual, out=out.view)
        out.check()
        assert_close("linear", out.view, oracle_linear(x, w, None, residual), WIDE)


@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("tokens", [1, 13, 32, 64])
def test_linear_of_large_weights(shape, tokens, rng, request):
    if not on_gpu(request):
        pytest.skip("the CPU's kernels do not change with the size")
    n, k = shape
    x = spread((tokens, k), torch.bfloat16, rng)
    w = spread((n, k), torch.bfloat16, rng)
    assert_close("linear", rk.linear(x, rk.pack_weight(w)), oracle_linear(x, w), ROUNDED[x.dtype])


@pytest.mark.parametrize("shape", HUGE, ids=str)
@pytest.mark.parametrize("tokens", [1, 17, 64])
def test_linear_of_huge_weights(shape, tokens, rng, request):
    if not on_gpu(request):
        pytest.skip("the CPU reads every weight alike")
    n, k = shape
    x = spread((tokens, k), torch.bfloat16, rng)
    w = spread((n, k), torch.bfloat16, rng)
    packed = rk.pack_weight(w)
    got = rk.linear(x, packed)
    assert_close("linear on Hopper", got, oracle_linear(x, w), ROUNDED[torch.bfloat16])
    assert_same_bits(rk.linear(x, packed), got)


def test_linear_residual_in_place(rng):
    x = spread((5, 64), torch.bfloat16, rng)
    w = spread((48, 64), torch.bfloat16, rng)
    residual = spread((5, 48), torch.bfloat16, rng)
    expected = oracle_linear(x, w, None, residual)
    assert rk.linear(x, rk.pack_weight(w), residual=residual, out=residual) is residual
    assert_close("linear", residual, expected, ROUNDED[x.dtype])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "shape", [(8, 8), (72, 200), (264, 1032), (1000, 512), (2056, 72)], ids=str
)
@pytest.mark.parametrize("tokens", [65, 100, 128, 129, 200, 257, 600])
@pytest.mark.parametrize("ends", ["residual", "bias and residual"])
def test_linear_of_many_rows_adds_the_residual_before_it_rounds(dtype, shape, tokens, ends, rng):
    n, k = shape
    x = spread((tokens, k), dtype, rng, gap=8)
    w = spread((n, k), dtype, rng)
    bias = spread((n,), dtype, rng) if "bias" in ends else None
    residual = spread((tokens, n), dtype, rng, gap=8)
    expected = oracle_linear(x, w, bias, residual)
    out = guarded((tokens, n), dtype, gap=8)
    weight = rk.pack_weight(w)
    assert rk.linear(x, weight, bias, residual=residual, out=out.view) is out.view
    out.check()
    assert_close("linear", out.view, expected, ROUNDED[dtype])
    assert rk.linear(x, weight, bias, residual=residual, out=residual) is residual
    assert_same_bits(residual, out.view)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(1032, 2048), (4104, 1032), (4096, 4096)], ids=str)
@pytest.mark.parametrize("tokens", [129, 250, 256, 257])
def test_linear_of_many_rows_and_few_tiles(dtype, shape, tokens, rng, request):
    if not on_gpu(request):
        pytest.skip("the CPU's kernels do not change with the size")
    n, k = shape
    x = spread((tokens, k), dtype, rng)
    w = spread((n, k), dtype, rng)
    residual = spread((tokens, n), dtype, rng)
    out = guarded((tokens, n), dtype, gap=8)
    weight = rk.pack_weight(w)
    assert rk.linear(x, weight, residual=residual, out=out.view) is out.view
    out.check()
    assert_close("linear", out.view, oracle_linear(x, w, None, residual), ROUNDED[dtype])
    assert_same_bits(rk.linear(x, weight, residual=residual), out.view)


def test_linear_of_many_rows_with_a_residual_that_no_copy_engine_reads(rng):
    x = spread((70, 64), torch.bfloat16, rng)
    w = spread((48, 64), torch.bfloat16, rng)
    residual = spread((70, 48), torch.bfloat16, rng, gap=3)
    expected = oracle_linear(x, w, None, residual)
    assert_close(
        "linear", rk.linear(x, rk.pack_weight(w), residual=residual), expected, COMPOSED[x.dtype]
    )
    odd = spread((70, 47), torch.bfloat16, rng)
    got = rk.linear(x, rk.pack_weight(w[:47]), residual=odd)
    assert_close("linear", got, oracle_linear(x, w[:47], None, odd), COMPOSED[x.dtype])


@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 1024)], ids=str)
def test_a_row_of_many_depends_on_neither_the_others_nor_their_number(shape, rng, request):
    if not on_gpu(request):
        pytest.skip("the CPU's kernels do not change with the size")
    n, k = shape
    w = rk.pack_weight(spread((n, k), torch.bfloat16, rng))
    for most, fewer in ((128, (65, 90)), (256, (129, 200)), (1500, (257, 400, 1000))):
        x = spread((most, k), torch.bfloat16, rng)
        residual = spread((most, n), torch.bfloat16, rng)
        whole = rk.linear(x, w, residual=residual)
        for m in fewer:
            assert_same_bits(rk.linear(x[:m], w, residual=residual[:m]), whole[:m])
            assert_same_bits(
                rk.linear(x[most - m :], w, residual=residual[most - m :]), whole[most - m :]
            )


@pytest.mark.parametrize("shape", [(264, 1032), (6144, 1024), (4096, 4096)], ids=str)
def test_a_row_depends_on_neither_the_others_nor_their_number(shape, rng, request):
    if not on_gpu(request) and shape[0] > 1000:
        pytest.skip("the CPU's kernels do not change with the size")
    n, k = shape
    w = rk.pack_weight(spread((n, k), torch.bfloat16, rng))
    for most, fewer, fused in (
        (16, (1, 3, 8, 9), False),
        (32, (17, 25), False),
        (64, (17, 32, 33, 63), True),
    ):
        x = spread((most, k), torch.bfloat16, rng)
        residual = spread((most, n), torch.bfloat16, rng) if fused else None
        whole = rk.linear(x, w, residual=residual)
        for m in fewer:
            first = slice(m)
            last = slice(most - m, None)
            for part in (first, last):
                more = residual[part] if fused else None
                assert_same_bits(rk.linear(x[part], w, residual=more), whole[part])


def test_nan_stays_in_its_token(rng):
    x = spread((20, 128), torch.bfloat16, rng)
    w = spread((136, 128), torch.bfloat16, rng)
    packed = rk.pack_weight(w)
    clean = rk.linear(x, packed)
    x[3, 5] = math.nan
    dirty = rk.linear(x, packed)
    assert torch.isnan(dirty[3]).all()
    keep = [i for i in range(20) if i != 3]
    assert_same_bits(dirty[keep], clean[keep])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("features", [8, 12, 72, 520])
@pytest.mark.parametrize("tokens", [0, 1, 9, 17, 40, 64, 70, 128, 300])
@pytest.mark.parametrize("interleaved", [False, True])
def test_linear_silu_and_mul(dtype, features, tokens, interleaved, rng, request):
    k = 136
    x = spread((tokens, k), dtype, rng, gap=8)
    w = spread((2 * features, k), dtype, rng) * 0.05
    both = oracle_linear(x, w)
    gate, up = (both[:, 0::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    out = guarded((tokens, features), dtype, gap=8)
    assert (
        rk.linear_silu_and_mul(x, rk.pack_weight(w), interleaved=interleaved, out=out.view)
        is out.view
    )
    out.check()
    fused = on_gpu(request) and features % 8 == 0 and tokens > 0
    assert_close("linear_silu_and_mul", out.view, expected, (ROUNDED if fused else COMPOSED)[dtype])
    exact = rk.reference.linear_silu_and_mul(x.double(), w.double(), interleaved=interleaved)
    assert_close("linear_silu_and_mul", out.view, exact, (ROUNDED if fused else COMPOSED)[dtype])


def test_leading_dimensions(rng):
    x = spread((2, 3, 64), torch.bfloat16, rng)
    w = spread((32, 64), torch.bfloat16, rng)
    packed = rk.pack_weight(w)
    assert_same_bits(rk.linear(x, packed), rk.linear(x.flatten(0, 1), packed).unflatten(0, (2, 3)))
    both = rk.linear_silu_and_mul(x, packed)
    assert both.shape == (2, 3, 16)
    assert_same_bits(both.flatten(0, 1), rk.linear_silu_and_mul(x.flatten(0, 1), packed))


@pytest.mark.parametrize("rows", [(2, 3), (5, 13)], ids=str)
def test_other_leading_dimensions_are_refused(rows, rng):
    """Of as many rows, which a kernel that sees rows alone would pair with others than theirs."""
    x = spread((*rows, 64), torch.bfloat16, rng)
    w = spread((64, 64), torch.bfloat16, rng)
    turned = torch.zeros(*rows[::-1], 64, dtype=torch.bfloat16)
    for weight in (rk.pack_weight(w), w):
        with pytest.raises(ValueError, match="residual"):
            rk.linear(x, weight, residual=turned)
        with pytest.raises(ValueError, match="out"):
            rk.linear(x, weight, out=turned)
        with pytest.raises(ValueError, match="out"):
            rk.linear(x, weight, residual=torch.zeros(*rows, 64, dtype=torch.bfloat16), out=turned)
        with pytest.raises(ValueError, match="out"):
            rk.linear_silu_and_mul(x, weight, out=turned[..., :32].contiguous())


@pytest.mark.parametrize("tokens", [3, 64, 65])
def test_bias_and_residual_of_any_strides(tokens, rng):
    x = spread((tokens, 64), torch.bfloat16, rng)
    w = spread((48, 64), torch.bfloat16, rng)
    bias = spread((96,), torch.bfloat16, rng)[::2]
    residual = spread((48, tokens), torch.bfloat16, rng).t()
    for weight in (rk.pack_weight(w), w):
        for ends in ((bias, None), (None, residual), (bias, residual)):
            got = rk.linear(x, weight, ends[0], residual=ends[1])
            assert_close("linear", got, oracle_linear(x, w, *ends), COMPOSED[x.dtype])


class _OnHopper(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU: what is chosen for it can be seen here."""

    device = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch):
    """Calls of linear_dense, which stands in for the library's and checks what that one checks."""
    calls = []

    def run(x, weight, bias, residual, gate, static, out):
        given = [t for t in (x, weight, bias, residual, out) if t is not None]
        assert all(t.stride(-1) == 1 for t in given) and {
            t.ndim for t in given if t is not bias
        } == {2}
        wide = oracle_linear(x, weight, bias, residual)
        if gate:
            first, second = wide.chunk(2, dim=-1)
            wide = torch.nn.functional.silu(first) * second
        out.copy_(wide)
        calls.append(len(x))

    monkeypatch.setattr(_dispatch, "native", lambda op, x: run if op == "linear_dense" else None)
    return calls


@pytest.mark.cpu_only
@pytest.mark.parametrize("rows", [(2, 3), (5, 13)], ids=str)
def test_what_the_fused_kernel_is_given(rows, rng, hopper):
    def make(*shape):
        return spread(shape, torch.bfloat16, rng).as_subclass(_OnHopper)

    count = math.prod(rows)
    x = make(*rows, 64)
    w = make(64, 64)
    residual = make(*rows, 64)
    bias = make(64)
    expected = oracle_linear(x, w, bias, residual)
    strided = make(64, *rows).permute(1, 2, 0).copy_(residual), make(128)[::2].copy_(bias)
    for other, vector in ((residual, bias), strided):
        out = make(*rows, 64)
        assert rk.linear(x, w, vector, residual=other, out=out) is out
        assert_close(
            "linear",
            out.as_subclass(torch.Tensor),
            expected.as_subclass(torch.Tensor),
            ROUNDED[x.dtype],
        )
    assert rk.linear_silu_and_mul(x, w).shape == (*rows, 32)
    assert hopper == [count] * 3
    for wrong in (make(*rows[::-1], 64), make(count, 64), make(*rows, 63)):
        with pytest.raises(ValueError, match="residual"):
            rk.linear(x, w, residual=wrong)
        with pytest.raises(ValueError, match="out"):
            rk.linear(x, w, residual=residual, out=wrong)
    with pytest.raises(ValueError, match="bias"):
        rk.linear(x, w, make(63), residual=residual)
    assert hopper == [count] * 3
    with pytest.raises(ValueError, match="out"):
        rk.linear_silu_and_mul(x, w, out=make(*rows[::-1], 32))


def scaled(a, b, sa, sb, bias=None):
    result = (a.double() @ b.double()) * (sa.double().reshape(-1, 1) * sb.double().reshape(1, -1))
    return result if bias is None else result + bias.double()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (48, 272), (272, 1040), (1056, 128)], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 9, 16, 33, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("kind", ["tensor", "row", "row and bias"])
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
    expected = scaled(a, b, sa, sb, bias)
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


@pytest.mark.parametrize("shape", [(128, 128), (384, 256), (1152, 1024)], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 33, 64, 65, 129, 300])
@pytest.mark.parametrize("columns", [False, True])
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
    assert_close("fp8_scaled_mm", got, scaled(a, b, sa, sb), FP8[torch.bfloat16])
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
    assert_close("fp8_scaled_mm", first, scaled(a, b, sa, sb), FP8[torch.bfloat16])
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
    assert_close("fp8_scaled_mm, fast_accum", out.view, scaled(a, b, sa, sb, bias), bound[dtype])
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
