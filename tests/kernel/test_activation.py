"""Gated activations: every form and dtype against float64, strides, NaN, errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import (
    FLOATS,
    ROUNDED_ONCE,
    assert_close,
    assert_same_bits,
    distant,
    guarded,
    spread,
)

_erf = np.vectorize(math.erf, otypes=[np.float64])
GATES = {
    "silu_and_mul": lambda g: g / (1 + np.exp(-g)),
    "gelu_and_mul": lambda g: g / 2 * (1 + _erf(g / math.sqrt(2))),
    "gelu_tanh_and_mul": lambda g: (
        g / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    ),
}


def oracle(op: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = np.split(x.double().numpy(), 2, axis=-1)
    return torch.from_numpy(GATES[op](gate) * up)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(0, 32), (1, 2), (3, 34), (2, 3, 512), (5, 2222)], ids=str)
@pytest.mark.parametrize("gap", [0, 7])
def test_gated(op, dtype, shape, gap, rng):
    x = spread(shape, dtype, rng, gap=gap)
    if shape[-1] == 2:  # one output: not one far down a tail, where a relative error is no measure
        x[..., 0] = x[..., 0].abs() + 0.5
    out = guarded((*shape[:-1], shape[-1] // 2), dtype, gap=gap)
    assert getattr(rk, op)(x, out=out.view) is out.view
    out.check()
    expected = oracle(op, x)
    assert_close(op, out.view, expected, ROUNDED_ONCE[dtype])
    assert_close(f"reference.{op}", getattr(rk.reference, op)(x.double()), expected, (1e-14, 1e-13))
    assert_same_bits(getattr(rk, op)(x), out.view.contiguous())


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [256, 33], ids=str)
def test_rows_that_step_unevenly(op, dtype, width, rng):
    """Some of a larger tensor's rows: no single step leads from each to the next."""
    whole = spread((3, 5, 2 * width), dtype, rng)
    x = whole[:, 1:4]
    out = torch.zeros((3, 4, width), dtype=dtype)
    getattr(rk, op)(x, out=out[:, :3])
    assert_same_bits(out[:, :3].contiguous(), getattr(rk, op)(x.contiguous()))
    assert not out[:, 3].any()


@pytest.mark.parametrize("op", GATES)
def test_far_from_zero(op):
    """Large gates: 0 on the left without NaN, the identity on the right."""
    gate = torch.tensor([-1e4, -200.0, -90.0, -30.0, 30.0, 90.0, 200.0, 1e4])
    out = getattr(rk, op)(torch.cat((gate, torch.full((8,), 2.0)))[None])[0]
    assert torch.isfinite(out).all()
    assert (out[:4].abs() < 1e-9).all()
    assert torch.equal(out[4:], gate[4:] * 2)


@pytest.mark.parametrize("op", GATES)
def test_nan_stays_in_place(op, rng):
    x = spread((3, 64), torch.bfloat16, rng)
    clean = getattr(rk, op)(x)
    x[1, 5] = math.nan
    x[2, 32 + 9] = math.nan
    out = getattr(rk, op)(x)
    assert torch.isnan(out).nonzero().tolist() == [[1, 5], [2, 9]]
    keep = ~torch.isnan(out)
    assert_same_bits(out[keep], clean[keep])


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="input"):
        rk.silu_and_mul(torch.ones(2, 5))
    with pytest.raises(TypeError, match="input"):
        rk.silu_and_mul(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="out"):
        rk.silu_and_mul(torch.ones(2, 4), out=torch.ones(2, 4))
    with pytest.raises(TypeError, match="out"):
        rk.silu_and_mul(torch.ones(2, 4), out=torch.ones(2, 2, dtype=torch.float16))
    with pytest.raises(ValueError, match="input"):
        rk.silu_and_mul(torch.ones(4, 2).t())


def test_rows_more_than_2_31_elements_apart(rng):
    x = distant((2, 64), torch.bfloat16)
    x.copy_(spread((2, 64), torch.bfloat16, rng))
    assert_same_bits(rk.silu_and_mul(x), rk.silu_and_mul(x.contiguous()))
