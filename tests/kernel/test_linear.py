"""Packed weights and what `linear` and `embedding` make of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import radix_kernels as rk
from radix_kernels import _loader
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits, distant, guarded, spread

# Sums of K float32 products, then one rounding; K up to 1,000 here.
TOLERANCE = {
    torch.float32: (3e-6, 2e-5),
    torch.float16: (4e-4, 5.5e-4),
    torch.bfloat16: (3e-3, 4.2e-3),
}
# cuBLAS may round the partial sums of a split K to the dtype.
ON_GPU = {
    torch.float32: (3e-6, 2e-5),
    torch.float16: (8e-4, 1.5e-3),
    torch.bfloat16: (6e-3, 1.2e-2),
}
# In two ops gate and up are rounded on their way, and silu of a negative gate magnifies that.
TWO_OPS = {dtype: (2 * norm, 2 * worst) for dtype, (norm, worst) in ON_GPU.items()}
SIZES = [(1, 1), (15, 31), (16, 32), (17, 33), (48, 64), (100, 7), (33, 1000)]


def oracle(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = x.double().numpy() @ w.double().numpy().T
    return torch.from_numpy(result if bias is None else result + bias.double().numpy())


@pytest.fixture
def tolerance(request):
    return TOLERANCE if request.config.getoption("--device") == "cpu" else ON_GPU


def poisoned_pack(w: torch.Tensor) -> rk.PackedWeight:
    """Pack from a view between NaNs, then spoil the source: nothing may still point to it."""
    holder = guarded(tuple(w.shape), w.dtype, gap=3)
    holder.view.copy_(w)
    packed = rk.pack_weight(holder.view)
    holder.view.fill_(math.nan)
    return packed


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_pack_and_unpack_keep_every_bit(dtype, n, k, rng):
    w = spread((n, k), dtype, rng)
    if w.numel() > 3:
        w.view(-1)[:3] = torch.tensor([math.inf, -0.0, math.nan], dtype=dtype)
    packed = poisoned_pack(w)
    assert (packed.n, packed.k, packed.shape) == (n, k, (n, k))
    assert packed.data.dtype == torch.uint8 and packed.nbytes == packed.data.numel()
    assert packed.dtype == str(dtype).removeprefix("torch.")
    assert_same_bits(rk.unpack_weight(packed), w)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 33])
@pytest.mark.parametrize("bias", [None, "same", "float32"])
def test_linear(dtype, n, k, tokens, bias, tolerance, rng):
    x = spread((tokens, k), dtype, rng, gap=5)
    w = spread((n, k), dtype, rng)
    b = None if bias is None else spread((n,), dtype if bias == "same" else torch.float32, rng)
    expected = oracle(x, w, b)
    for weight in (poisoned_pack(w), w):
        out = guarded((tokens, n), dtype, gap=3)
        assert rk.linear(x, weight, b, out=out.view) is out.view
        out.check()
        assert_close("linear", out.view, expected, tolerance[dtype])
        assert_same_bits(rk.linear(x, weight, b), out.view.contiguous())
    wide = rk.reference.linear(x.double(), w.double(), None if b is None else b.double())
    assert_close("reference.linear", wide, expected, (1e-13, 1e-11))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33, 65])
@pytest.mark.parametrize("n", [17, 48])
def test_float32_results_are_not_rounded(dtype, tokens, n, rng):
    x = spread((tokens, 40), dtype, rng)
    w = spread((n, 40), dtype, rng)
    bias = spread((n,), dtype, rng)
    residual = spread((tokens, n), dtype, rng)
    for weight in (poisoned_pack(w), w):
        for ends in ((None, None), (bias, residual)):
            expected = oracle(x, w, ends[0]) + (0 if ends[1] is None else residual.double())
            got = rk.linear(x, weight, ends[0], residual=ends[1], out_dtype="float32")
            assert got.dtype == torch.float32
            assert_close("linear", got, expected, (1e-5, 1e-4))
            out = guarded((tokens, n), torch.float32, gap=3)
            rk.linear(x, weight, ends[0], residual=ends[1], out_dtype=torch.float32, out=out.view)
            out.check()
            assert_same_bits(out.view.contiguous(), got)


def test_leading_dimensions(rng):
    x = spread((2, 3, 40), torch.float32, rng)
    w = spread((24, 40), torch.float32, rng)
    out = rk.linear(x, rk.pack_weight(w))
    assert out.shape == (2, 3, 24)
    assert_same_bits(out.view(6, 24), rk.linear(x.view(6, 40), rk.pack_weight(w)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_and_threads_do_not_change_bits(dtype, rng):
    x = spread((70, 200), dtype, rng)
    w = spread((90, 200), dtype, rng)
    packed = rk.pack_weight(w)
    if packed.layout == "reference":
        pytest.skip("torch's GEMM computes the reference layout and promises nothing about bits")
    whole = rk.linear(x, packed)
    for begin, end in ((0, 1), (3, 5), (10, 26), (37, 70)):
        assert_same_bits(rk.linear(x[begin:end], packed), whole[begin:end])
    before = rk.get_num_threads()
    try:
        for threads in (1, 2, 3):
            rk.set_num_threads(threads)
            assert_same_bits(rk.linear(x, packed), whole)
    finally:
        rk.set_num_threads(before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_batch(dtype, tolerance, rng):
    """More rows than a task takes, and more K than stays in a cache: still a row's bits, with a
    gate too."""
    x = spread((700, 2500), dtype, rng)
    w = spread((96, 2500), dtype, rng) * 0.02  # gate times up stays far from float16's largest
    packed = rk.pack_weight(w)
    out = rk.linear(x, packed)
    gated = rk.linear_silu_and_mul(x, packed)
    assert_close("linear", out, oracle(x, w, None), tolerance[dtype])
    gate, up = oracle(x, w, None).chunk(2, dim=1)
    allowed = TOLERANCE if _loader.backend == "cpu" else TWO_OPS
    assert_close("linear_silu_and_mul", gated, torch.nn.functional.silu(gate) * up, allowed[dtype])
    if packed.layout == "reference":
        return
    for row in (0, 511, 699):
        assert_same_bits(rk.linear(x[row : row + 1], packed), out[row : row + 1])
        assert_same_bits(rk.linear_silu_and_mul(x[row : row + 1], packed), gated[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [None, "int8", "fp8", "w8a8", "int4", "w4a8"])
def test_outputs_larger_than_caches(dtype, kind, rng):
    """Megabytes of them, of plain, gated and added products: the bits of the same rows alone."""
    if kind and _loader.backend != "cpu":
        pytest.skip("quantized weights belong to the CPU library")
    x = spread((700, 96), dtype, rng)
    w = spread((2048, 96), dtype, rng) / 8
    packed = rk.pack_weight(w, kind=kind)
    bias = spread((2048,), torch.float32, rng)
    exact = rk.linear(x, packed, out_dtype=torch.float32).double()
    assert_close("linear", rk.linear(x, packed), exact, TOLERANCE[dtype])
    biased = rk.linear(x, packed, bias)
    gated = rk.linear_silu_and_mul(x, packed)
    assert_close("linear", biased, exact + bias.double(), TOLERANCE[dtype])
    gate, up = exact.chunk(2, dim=1)
    allowed = TOLERANCE if _loader.backend == "cpu" else TWO_OPS
    assert_close("linear_silu_and_mul", gated, torch.nn.functional.silu(gate) * up, allowed[dtype])
    if packed.layout == "reference":
        return
    residual = spread((700, 2048), dtype, rng)
    added = residual.clone()
    rk.linear(x, packed, bias, residual=added, out=added)
    assert_close("linear", added, exact + bias.double() + residual.double(), TOLERANCE[dtype])
    for row in (0, 350, 699):
        assert_same_bits(rk.linear(x[row : row + 1], packed, bias), biased[row : row + 1])
        assert_same_bits(
            rk.linear(x[row : row + 1], packed, bias, residual=residual[row : row + 1]),
            added[row : row + 1],
        )
        assert_same_bits(rk.linear_silu_and_mul(x[row : row + 1], packed), gated[row : row + 1])


def test_nan_rows_and_padding(rng):
    """A NaN in x reaches its row, one in w its column; padding is never an output."""
    x = spread((5, 33), torch.bfloat16, rng)
    w = spread((17, 33), torch.bfloat16, rng)
    clean = rk.linear(x, rk.pack_weight(w))
    x[2, 32] = math.nan
    out = rk.linear(x, rk.pack_weight(w))
    assert torch.isnan(out[2]).all()
    assert_same_bits(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    x[2, 32] = 1.0
    w[16, 32] = math.inf
    out = rk.linear(x, rk.pack_weight(w))
    assert not torch.isfinite(out[:, 16]).any()
    assert torch.isfinite(out[:, :16]).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_embedding(dtype, index, tokens, rng):
    w = spread((37, 45), dtype, rng)
    w[5, 3] = math.inf
    w[5, 4] = -0.0
    ids = torch.randint(0, 37, (tokens,), generator=rng).to(index)
    if tokens > 2:
        ids[:2] = torch.tensor([0, 36])
    expected = torch.from_numpy(w.view(torch.uint8).numpy().reshape(37, -1)[ids.numpy()].copy())
    for weight in (poisoned_pack(w), w):
        out = guarded((tokens, 45), dtype, gap=2)
        assert rk.embedding(ids, weight, out=out.view) is out.view
        out.check()
        assert torch.equal(out.view.contiguous().view(torch.uint8).view(expected.shape), expected)
        assert_same_bits(rk.embedding(ids, weight), out.view.contiguous())


@pytest.mark.cpu_only
@pytest.mark.parametrize("bad", [-1, 37])
def test_embedding_checks_ids(bad, rng):
    w = spread((37, 16), torch.float32, rng)
    for weight in (w, rk.pack_weight(w)):
        with pytest.raises(ValueError, match="ids"):
            rk.embedding(torch.tensor([1, bad, 2]), weight)


def test_tied_head_and_embedding_share_a_weight(tolerance, rng):
    w = spread((50, 32), torch.bfloat16, rng)
    packed = poisoned_pack(w)
    hidden = rk.embedding(torch.tensor([4, 49]), packed)
    assert_close("linear", rk.linear(hidden, packed), oracle(hidden, w, None), tolerance[w.dtype])


def test_errors():
    w = torch.ones(6, 8)
    x = torch.ones(2, 8)
    packed = rk.pack_weight(w)
    with pytest.raises(NotImplementedError, match="kind"):
        rk.pack_weight(w, kind="int3")
    with pytest.raises(ValueError, match="scales"):
        rk.pack_weight(w, torch.ones(6))
    with pytest.raises(TypeError, match="w"):
        rk.pack_weight(w.int())
    with pytest.raises(ValueError, match="w"):
        rk.pack_weight(w[0])
    with pytest.raises(ValueError, match="w"):
        rk.pack_weight(w[:, :0])
    for weight in (w, packed):
        with pytest.raises(ValueError, match="x"):
            rk.linear(x[:, :7], weight)
        with pytest.raises(TypeError):
            rk.linear(x.half(), weight)
        with pytest.raises(ValueError, match="bias"):
            rk.linear(x, weight, torch.ones(5))
        with pytest.raises(ValueError, match="out"):
            rk.linear(x, weight, out=torch.ones(2, 5))
        with pytest.raises(TypeError, match="out_dtype"):
            rk.linear(x, weight, out_dtype=torch.bfloat16)
        with pytest.raises(TypeError, match="out"):
            rk.linear(x, weight, out=torch.ones(2, 6).half())
        with pytest.raises(TypeError):
            rk.embedding(torch.ones(2), weight)
        with pytest.raises((TypeError, ValueError), match="out"):
            rk.embedding(torch.tensor([1]), weight, out=torch.ones(1, 8).half())


@pytest.mark.cpu_only
def test_numpy_arrays(rng):
    x = spread((3, 20), torch.float32, rng)
    w = spread((9, 20), torch.float32, rng)
    out = rk.linear(x.numpy(), rk.pack_weight(w.numpy()))
    assert isinstance(out, np.ndarray)
    assert_close("linear", torch.from_numpy(out), oracle(x, w, None), TOLERANCE[torch.float32])


@pytest.mark.cpu_only  # cuBLAS counts strides in 32 bits and refuses these
def test_rows_more_than_2_31_elements_apart(rng):
    x = distant((2, 40), torch.bfloat16)
    x.copy_(spread((2, 40), torch.bfloat16, rng))
    packed = rk.pack_weight(spread((9, 40), torch.bfloat16, rng))
    assert_same_bits(rk.linear(x, packed), rk.linear(x.contiguous(), packed))


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", [None, "int8", "fp8", "w8a8", "int4", "w4a8"])
@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_epilogue_of_packed_weights(dtype, kind, tokens, rng):
    """Bias, residual (which may be out) and the gate happen in float32, before the one rounding."""
    if kind and _loader.backend != "cpu":
        pytest.skip("quantized weights belong to the CPU library")
    x = spread((tokens, 96), dtype, rng)
    w = spread((64, 96), dtype, rng) / 8
    packed = rk.pack_weight(w, kind=kind)
    exact = rk.linear(x, packed, out_dtype=torch.float32).double()
    bias = spread((64,), torch.float32, rng)
    residual = guarded((tokens, 64), dtype, gap=3)
    residual.view.copy_(spread((tokens, 64), dtype, rng))
    expected = exact + bias.double() + residual.view.double()
    assert_close(
        "linear", rk.linear(x, packed, bias, residual=residual.view), expected, TOLERANCE[dtype]
    )
    wide = rk.linear(x, packed, bias, residual=residual.view, out_dtype="float32")
    assert_close("linear", wide, expected, TOLERANCE[torch.float32])
    assert rk.linear(x, packed, bias, residual=residual.view, out=residual.view) is residual.view
    residual.check()
    assert_close("linear", residual.view, expected, TOLERANCE[dtype])
    for interleaved, features in ((False, 32), (True, 32), (True, 21), (False, 21)):
        rows = rk.pack_weight(w[: 2 * features], kind=kind)
        sums = rk.linear(x, rows, out_dtype=torch.float32).double()
        gate, up = (sums[:, ::2], sums[:, 1::2]) if interleaved else sums.split(features, dim=-1)
        out = guarded((tokens, features), dtype, gap=2)
        assert rk.linear_silu_and_mul(x, rows, interleaved=interleaved, out=out.view) is out.view
        out.check()
        fused = interleaved or features % 16 == 0
        allowed = TOLERANCE if fused else TWO_OPS
        assert_close(
            "linear_silu_and_mul", out.view, torch.nn.functional.silu(gate) * up, allowed[dtype]
        )
