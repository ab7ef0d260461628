"""Products that keep x of kinds that quantize it otherwise (`linear(keep_x=True)`): on AMX tiles,
which test_emulated_tiles.py emulates; elsewhere the option says nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import radix_kernels as rk
from tests.kernel import super_blocks, test_linear_mxfp4
from tests.kernel.helpers import assert_close, assert_same_bits, guarded, spread
from tests.kernel.packed_weights import (
    CPU_LIBRARY_ONLY,
    HAS_TILES,
    TOLERANCE,
    assert_rows_stand_alone,
)
from tests.kernel.super_blocks import SuperWeight
from tests.kernel.test_linear_quantized import Weight

pytestmark = CPU_LIBRARY_ONLY

SIZES = [
    (1, 34),
    (15, 32),
    (16, 64),
    (48, 128),
    (33, 1000),
    (80, 418),
    (17, 298),
    (33, 576),
    (40, 1060),
]
SCALES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Made:
    """A packed weight, its elements in float64, and x as it meets them without keep_x."""

    packed: rk.PackedWeight
    value: torch.Tensor
    rounded: Callable[[torch.Tensor], torch.Tensor]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """What `linear` with keep_x should give, in float64."""
        if HAS_TILES:
            return x.double() @ self.value.float().bfloat16().double().T
        return self.rounded(x) @ self.value.T


def groups(kind: str, group: int, origin: str, *, dtype: torch.dtype = torch.bfloat16):
    def make(n, k, rng):
        weight = Weight.random(kind, group, origin, n, k, rng, SCALES[n % 3])
        return Made(packed=weight.pack(dtype), value=weight.value(), rounded=weight.x)

    return make


def supers(kind: str, has_mins: bool):
    def make(n, k, rng):
        weight = SuperWeight.random(kind, n, k, rng, has_mins=has_mins)
        value = weight.value()
        return Made(packed=weight.pack(), value=value, rounded=super_blocks.rounded_x)

    return make


def mxfp4(n, k, rng):
    stored, powers, value = test_linear_mxfp4.random_weight(n, k, rng)
    return Made(
        packed=rk.pack_weight(stored, powers, "mxfp4"),
        value=value,
        rounded=test_linear_mxfp4.rounded_x,
    )


KEEPING = {
    **{
        f"w8a8-{group}-{origin}": groups("w8a8", group, origin)
        for group, origin in itertools.product((16, 32), ("", "mins"))
    },
    **{
        f"w4a8-{group}-{origin}": groups("w4a8", group, origin)
        for group, origin in itertools.product((32, 64), ("", "zeros", "mins"))
    },
    **{
        f"{kind}-{has_mins}": supers(kind, has_mins)
        for kind, has_mins in itertools.product(super_blocks.KINDS, (False, True))
    },
    "mxfp4": mxfp4,
}
QUANTIZING = [
    groups("w8a8", 0, ""),
    groups("w8a8", 64, ""),
    groups("w8a8", 128, ""),
    groups("w4a8", 128, ""),
    groups("w8a8", 32, "", dtype=torch.float16),
    groups("w4a8", 32, "", dtype=torch.float32),
]
kinds = pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING)


@kinds
@pytest.mark.parametrize("tokens", [0, 1, 3, 17, 33, 70])
def test_linear(make, tokens, rng):
    for n, k in SIZES:
        made = make(n, k, rng)
        x = spread((tokens, k), torch.bfloat16, rng, gap=5)
        expected = made.product(x)
        out = guarded((tokens, n), torch.bfloat16, gap=3)
        assert rk.linear(x, made.packed, out=out.view, keep_x=True) is out.view
        out.check()
        assert_close("linear", out.view, expected, TOLERANCE[torch.bfloat16])
        wide = rk.linear(x, made.packed, out_dtype=torch.float32, keep_x=True)
        assert_close("linear", wide, expected, TOLERANCE[torch.float32])


@kinds
def test_large_batch(make, rng):
    """More rows than a task takes, and more K than stays in a cache."""
    made = make(40, 2500, rng)
    x = spread((700, 2500), torch.bfloat16, rng)
    out = rk.linear(x, made.packed, keep_x=True)
    assert_close("linear", out, made.product(x), TOLERANCE[torch.bfloat16])
    for row in (0, 511, 699):
        part = rk.linear(x[row : row + 1], made.packed, keep_x=True)
        assert_same_bits(part, out[row : row + 1])


@kinds
def test_rows_and_threads_do_not_change_bits(make, rng):
    made = make(90, 600, rng)
    x = spread((140, 600), torch.bfloat16, rng)
    assert_rows_stand_alone(x, made.packed, keep_x=True)


@kinds
@pytest.mark.parametrize("tokens", [20, 80])
def test_epilogues(make, tokens, rng):
    made = make(64, 512, rng)
    x = spread((tokens, 512), torch.bfloat16, rng)
    sums = made.product(x)
    bias = spread((64,), torch.float32, rng)
    residual = spread((tokens, 64), torch.bfloat16, rng)
    got = rk.linear(x, made.packed, bias, residual=residual, keep_x=True)
    expected = sums + bias.double() + residual.double()
    assert_close("linear", got, expected, TOLERANCE[torch.bfloat16])
    gate, up = sums.chunk(2, dim=-1)
    got = rk.linear_silu_and_mul(x, made.packed, keep_x=True)
    expected = torch.nn.functional.silu(gate) * up
    assert_close("linear_silu_and_mul", got, expected, TOLERANCE[torch.bfloat16])


@kinds
def test_rows_that_are_not_finite(make, rng):
    made = make(33, 600, rng)
    x = spread((40, 600), torch.bfloat16, rng)
    x[1] = 0
    clean = rk.linear(x, made.packed, keep_x=True)
    assert (clean[1] == 0).all()
    for value in (math.nan, math.inf):
        x[2, 450] = value
        out = rk.linear(x, made.packed, keep_x=True)
        assert not torch.isfinite(out[2]).any()
        others = [i for i in range(40) if i != 2]
        assert_same_bits(out[others], clean[others])


@pytest.mark.parametrize("make", QUANTIZING)
def test_what_quantizes_all_the_same(make, rng):
    made = make(48, 256, rng)
    dtype = getattr(torch, made.packed.dtype)
    for tokens in (3, 70):
        x = spread((tokens, 256), dtype, rng)
        kept = rk.linear(x, made.packed, keep_x=True)
        assert_same_bits(kept, rk.linear(x, made.packed))


@pytest.mark.skipif(not HAS_TILES, reason="needs AMX")
@kinds
def test_it_is_nearer_to_the_exact_product(make, rng):
    made = make(64, 1024, rng)
    x = spread((70, 1024), torch.bfloat16, rng)
    exact = x.double() @ made.value.T

    def error(**options):
        got = rk.linear(x, made.packed, out_dtype=torch.float32, **options)
        return (got.double() - exact).norm() / exact.norm()

    assert error(keep_x=True) < error() / 2
