"""RMSNorm, plain and with the residual added: against float64, strides, NaN, errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import (
    DEFINITION,
    FLOATS,
    ROUNDED_ONCE,
    assert_close,
    assert_same_bits,
    distant,
    guarded,
    spread,
)

SHAPES = [(0, 64), (1, 1), (1, 17), (3, 64), (5, 127), (2, 3, 256), (7, 1000), (2, 4096)]


def numpy_rmsnorm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    a = x.double().numpy()
    mean = np.sum(a * a, axis=-1, keepdims=True) / a.shape[-1]
    return torch.from_numpy(a / np.sqrt(mean + eps) * w.double().numpy())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gap", [0, 3])
def test_rmsnorm(shape, dtype, gap, rng):
    x = spread(shape, dtype, rng, gap=gap)
    w = spread(shape[-1:], dtype, rng)
    out = guarded(shape, dtype, gap=gap)
    result = rk.rmsnorm(x, w, 1e-5, out=out.view)
    assert result is out.view
    out.check()
    assert_close("rmsnorm", out.view, numpy_rmsnorm(x, w, 1e-5), ROUNDED_ONCE[dtype])
    exact = rk.reference.rmsnorm(x.double(), w.double(), 1e-5)
    assert_close("reference.rmsnorm", exact, numpy_rmsnorm(x, w, 1e-5), DEFINITION)
    assert_same_bits(rk.rmsnorm(x, w, 1e-5), out.view.contiguous())


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_float32_weight_and_in_place(dtype, rng):
    x = spread((4, 96), dtype, rng)
    w = spread((96,), torch.float32, rng)
    expected = numpy_rmsnorm(x, w, 1e-6)
    assert rk.rmsnorm(x, w, out=x) is x
    assert_close("rmsnorm", x, expected, ROUNDED_ONCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gap", [0, 5])
def test_fused_add_rmsnorm(shape, dtype, gap, rng):
    x, r = (spread(shape, dtype, rng, gap=gap) for _ in range(2))
    w = spread(shape[-1:], dtype, rng)
    exact = x.double()
    sums = r.double()
    unrounded = exact + sums
    rk.reference.fused_add_rmsnorm(exact, sums, w.double())
    assert torch.equal(sums, unrounded)
    expected = numpy_rmsnorm(unrounded, w, 1e-6)
    assert_close("reference.fused_add_rmsnorm", exact, expected, DEFINITION)
    assert rk.fused_add_rmsnorm(x, r, w) is None
    assert_same_bits(r, unrounded.to(dtype))
    assert_close("fused_add_rmsnorm", x, expected, ROUNDED_ONCE[dtype])


# Widths: a lane's or a block's share of a row, a row that is read twice, one without whole packs.
@pytest.mark.parametrize("width", [256, 1024, 4096, 16400, 333])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_sum_is_normalized_before_it_is_rounded(dtype, width, rng):
    x, r = (spread((40, width), dtype, rng) for _ in range(2))
    w = spread((width,), torch.float32, rng)
    total = x.float() + r.float()
    expected = numpy_rmsnorm(total, w, 1e-6)
    once = numpy_rmsnorm(total, w, 1e-6).to(dtype).double()
    rk.fused_add_rmsnorm(x, r, w)
    # One rounding, where the norm of the rounded sum has 1.4 times its error.
    best = (once - expected).norm() / expected.norm()
    assert (x.double() - expected).norm() / expected.norm() <= 1.05 * best + 1e-7


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fused_equals_a_float32_add_then_norm(dtype, rng):
    x, r, w = (spread(s, dtype, rng) for s in ((6, 203), (6, 203), (203,)))
    total = x.float() + r.float()
    apart = rk.rmsnorm(total, w.float())
    rk.fused_add_rmsnorm(x, r, w)
    assert_same_bits(r, total.to(dtype))
    assert_same_bits(x, apart.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_inf_stay_in_their_row(dtype, rng):
    x = spread((5, 64), dtype, rng)
    clean = rk.rmsnorm(x, torch.ones(64, dtype=dtype))
    x[1, 7] = math.nan
    x[3, 9] = math.inf
    out = rk.rmsnorm(x, torch.ones(64, dtype=dtype))
    assert torch.isnan(out[1]).all()
    assert torch.isnan(out[3, 9])
    assert_same_bits(out[[0, 2, 4]], clean[[0, 2, 4]])


def test_rows_do_not_depend_on_the_batch(rng):
    x = spread((33, 519), torch.bfloat16, rng)
    w = spread((519,), torch.bfloat16, rng)
    whole = rk.rmsnorm(x, w)
    for row in (0, 16, 32):
        assert_same_bits(rk.rmsnorm(x[row : row + 1], w), whole[row : row + 1])


def test_large_values_do_not_overflow(rng):
    x = spread((2, 128), torch.float16, rng) * 0 + 60000
    ones = torch.ones(128, dtype=torch.float16)
    assert_close(
        "rmsnorm", rk.rmsnorm(x, ones), numpy_rmsnorm(x, ones, 1e-6), ROUNDED_ONCE[x.dtype]
    )


def test_rows_more_than_2_31_elements_apart(rng):
    x, r, out = (distant((2, 64), torch.bfloat16) for _ in range(3))
    w = spread((64,), torch.bfloat16, rng)
    x.copy_(spread((2, 64), torch.bfloat16, rng))
    r.copy_(spread((2, 64), torch.bfloat16, rng))
    assert_same_bits(rk.rmsnorm(x, w, out=out), rk.rmsnorm(x.contiguous(), w))
    near_x = x.contiguous()
    near_r = r.contiguous()
    rk.fused_add_rmsnorm(x, r, w)
    rk.fused_add_rmsnorm(near_x, near_r, w)
    assert_same_bits(x, near_x)
    assert_same_bits(r, near_r)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"weight": torch.ones(7)}, ValueError, "weight"),
        ({"weight": torch.ones(8, dtype=torch.float16)}, TypeError, "weight"),
        ({"input": torch.ones(2, 8, dtype=torch.int32)}, TypeError, "input"),
        ({"input": torch.ones(2, 8, dtype=torch.float64)}, TypeError, "input"),
        ({"input": torch.ones(8, 2).t()}, ValueError, "input"),
        ({"out": torch.ones(2, 7)}, ValueError, "out"),
        ({"out": torch.ones(2, 8, dtype=torch.bfloat16)}, TypeError, "out"),
        ({"input": [1.0, 2.0]}, TypeError, "tensor"),
    ],
)
def test_errors_name_the_argument(change, error, text):
    args = {"input": torch.ones(2, 8), "weight": torch.ones(8), "out": torch.ones(2, 8)} | change
    with pytest.raises(error, match=text):
        rk.rmsnorm(args["input"], args["weight"], out=args["out"])


@pytest.mark.cpu_only
def test_other_frameworks(rng):
    x = spread((3, 32), torch.float32, rng)
    w = torch.ones(32)
    out = rk.rmsnorm(x.numpy(), w.numpy())
    assert isinstance(out, np.ndarray)
    assert_same_bits(torch.from_numpy(out), rk.rmsnorm(x, w))
