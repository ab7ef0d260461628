"""LayerNorm: against float64, strides, NaN, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import (
    FLOATS,
    ROUNDED_ONCE,
    assert_close,
    assert_same_bits,
    guarded,
    spread,
)

SHAPES = [(0, 64), (1, 17), (3, 64), (5, 127), (2, 3, 256), (7, 1000), (2, 4096)]


def numpy_layernorm(
    x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None, eps: float
) -> torch.Tensor:
    a = x.double().numpy()
    scale = 1.0 if w is None else w.double().numpy()
    y = (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + eps) * scale
    return torch.from_numpy(y if b is None else y + b.double().numpy())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gap", [0, 3])
def test_layernorm(shape, dtype, gap, rng):
    x = spread(shape, dtype, rng, gap=gap)
    w, b = (spread(shape[-1:], dtype, rng) for _ in range(2))
    out = guarded(shape, dtype, gap=gap)
    assert rk.layernorm(x, w, b, 1e-5, out=out.view) is out.view
    out.check()
    assert_close("layernorm", out.view, numpy_layernorm(x, w, b, 1e-5), ROUNDED_ONCE[dtype])
    exact = rk.reference.layernorm(x.double(), w.double(), b.double(), 1e-5)
    assert_close("reference.layernorm", exact, numpy_layernorm(x, w, b, 1e-5), (1e-12, 1e-10))
    assert_same_bits(rk.layernorm(x, w, b, 1e-5), out.view.contiguous())


@pytest.mark.parametrize("weight", [None, "float32", "same"])
@pytest.mark.parametrize("bias", [None, "float32", "same"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_optional_rows_of_either_type_in_place(weight, bias, dtype, rng):
    x = spread((4, 99), dtype, rng)
    types = {"float32": torch.float32, "same": dtype}
    w, b = (spread((99,), types[name], rng) if name else None for name in (weight, bias))
    expected = numpy_layernorm(x, w, b, 1e-5)
    assert rk.layernorm(x, w, b, out=x) is x
    assert_close("layernorm", x, expected, ROUNDED_ONCE[dtype])


def test_a_large_mean_costs_no_digits_of_the_variance(rng):
    """The variance is of the differences: a sum of squares would have lost it here."""
    x = torch.randn(3, 512, generator=rng) + 4096
    assert_close("layernorm", rk.layernorm(x), numpy_layernorm(x, None, None, 1e-5), (4e-4, 2e-3))


def test_rows_do_not_depend_on_each_other(rng):
    x = spread((9, 300), torch.bfloat16, rng)
    x[4, 7] = float("nan")
    whole = rk.layernorm(x)
    assert whole[4].isnan().all()
    for row in (0, 3, 5, 8):
        assert_same_bits(rk.layernorm(x[row]), whole[row])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"input": lambda x: x.double()}, TypeError),
        ({"input": lambda x: x.t()}, ValueError),
        ({"weight": lambda w: w[:-1]}, ValueError),
        ({"weight": lambda w: w.half()}, TypeError),
        ({"bias": lambda b: b.half()}, TypeError),
        ({"bias": lambda b: b[None]}, ValueError),
    ],
)
def test_errors(change, error, rng):
    args = {"input": torch.randn(4, 8), "weight": torch.ones(8), "bias": torch.zeros(8)}
    for name, edit in change.items():
        args[name] = edit(args[name])
    with pytest.raises(error, match="layernorm"):
        rk.layernorm(**args)
