"""Products with fused ends and FP8 products: against float64, bits, borders, errors."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _choices, _dispatch
from tests.kernel.gemm_cases import HALVES, on_gpu
from tests.kernel.helpers import assert_close, assert_same_bits, guarded, spread

ROUNDED = {torch.float16: (5e-4, 7e-4), torch.bfloat16: (3.95e-3, 4.3e-3)}
# torch rounds gate and up, and cuBLAS may round partial sums.
WIDE = (1e-5, 1e-4)  # float32 results: sums of tensor cores lose bits below their largest term
COMPOSED = {torch.float16: (2e-3, 6e-3), torch.bfloat16: (1.2e-2, 4e-2)}

TOKENS = [0, 1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64]
SHAPES = [(1, 8), (8, 64), (24, 72), (100, 200), (264, 1032), (1000, 512)]
LARGE = [(6144, 1024), (1024, 4096), (34000, 256), (4096, 4096), (8440, 2560), (9728, 2560)]
# From 96 MiB on: k shared or not, in one round of tiles or more.
HUGE = [(8192, 8192), (12288, 4096), (24576, 2048)]


def oracle_linear(x, w, bias=None, residual=None):
    result = x.double() @ w.double().T
    for extra in (bias, residual):
        result = result if extra is None else result + extra.double()
    return result


@pytest.mark.combinations(
    ends=["nothing", "bias", "float bias", "residual", "all"],
    tokens=TOKENS,
    shape=SHAPES,
    dtype=HALVES,
)
def test_linear_with_its_ends(dtype, shape, tokens, ends, rng, request):
    n, k = shape
    x = spread((tokens, k), dtype, rng, gap=8)
    w = spread((n, k), dtype, rng)
    bias = None
    if ends in ("bias", "float bias", "all"):
        bias = spread((n,), torch.float32 if ends == "float bias" else dtype, rng)
    residual = spread((tokens, n), dtype, rng, gap=3) if ends in ("residual", "all") else None
    expected = oracle_linear(x, w, bias, residual)
    fused = not on_gpu(request) or k % 8 == 0
    tolerance = ROUNDED if fused and tokens else COMPOSED
    for weight in (rk.pack_weight(w), w):
        out = guarded((tokens, n), dtype, gap=8)
        assert rk.linear(x, weight, bias, residual=residual, out=out.view) is out.view
        out.check()
        assert_close("linear", out.view, expected, tolerance[dtype])


@pytest.mark.combinations(tokens=TOKENS, shape=SHAPES, dtype=HALVES)
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


@pytest.mark.combinations(
    ends=["residual", "bias and residual"],
    tokens=[65, 100, 128, 129, 200, 257, 600],
    shape=[(8, 8), (72, 200), (264, 1032), (1000, 512), (2056, 72)],
    dtype=HALVES,
)
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


def test_linear_of_many_rows_with_a_residual_that_tma_cannot_read(rng):
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
    ranges = ((128, (65, 90)), (192, (129, 150)), (256, (193, 250)), (1500, (257, 400, 1000)))
    for most, fewer in ranges:
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


@pytest.mark.combinations(
    interleaved=[False, True],
    tokens=[0, 1, 9, 17, 40, 64, 70, 128, 300],
    features=[8, 12, 72, 520],
    dtype=HALVES,
)
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


@pytest.mark.cpu_only
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rows", [(), (1,), (3, 5), (0,)], ids=str)
def test_torch_adds_a_residual(rows, in_place, rng):
    """Into out, over the residual or beside it, with gaps and without out."""
    x = spread((*rows, 40), torch.float32, rng)
    w = spread((24, 40), torch.float32, rng)
    residual = spread((*rows, 24), torch.float32, rng)
    expected = oracle_linear(x, w, None, residual)
    before = residual.clone()
    out = residual if in_place else torch.full_like(residual, torch.nan)
    assert rk.linear(x, w, residual=residual, out=out) is out
    assert_close("linear", out, expected, WIDE)
    if in_place:
        return
    assert_same_bits(residual, before)
    assert_close("linear", rk.linear(x, w, residual=residual), expected, WIDE)
    spaced = torch.full((*rows, 48), torch.nan)[..., ::2]
    rk.linear(x, w, residual=residual, out=spaced)
    assert_close("linear", spaced, expected, WIDE)
    transposed = residual.mT.contiguous().mT if len(rows) > 1 else residual
    assert_close("linear", rk.linear(x, w, residual=transposed, out=out), expected, WIDE)


@pytest.mark.cpu_only
def test_where_blas_is_ahead_no_gate_is_fused(rng, hopper, monkeypatch):
    monkeypatch.setattr(_choices, "blas_is_ahead_of_fused", lambda *args, gated: gated)
    x, w, residual = (
        spread(shape, torch.bfloat16, rng).as_subclass(_OnHopper)
        for shape in ((70, 64), (64, 64), (70, 64))
    )
    gate, up = oracle_linear(x, w).as_subclass(torch.Tensor).chunk(2, dim=-1)
    got = rk.linear_silu_and_mul(x, w).as_subclass(torch.Tensor)
    expected = gate / (1 + torch.exp(-gate)) * up
    assert_close("linear_silu_and_mul", got, expected, COMPOSED[x.dtype])
    assert hopper == []
    rk.linear(x, w, residual=residual)
    assert hopper == [70]  # cuBLAS would round parts of its sums
