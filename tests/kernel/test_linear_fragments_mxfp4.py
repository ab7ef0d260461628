"""MXFP4 weights on a Hopper GPU: where the powers of two lie, and every one of them."""

from __future__ import annotations

import pytest
import torch

import radix_kernels as rk
from tests.kernel.code_weights import FLOAT4
from tests.kernel.helpers import assert_close, spread
from tests.kernel.quantized_cases import make_form, random_weight

MXFP4 = make_form("mxfp4", 32, torch.uint8)
ROUNDED = (3.95e-3, 4.3e-3)  # of bf16, rounded once


@pytest.fixture(autouse=True)
def _on_gpu(request):
    if request.config.getoption("--device") != "cuda":
        pytest.skip("the layout is of Hopper's library")


def test_order_of_the_powers_of_two(rng):
    """Scales of mxfp4: of a tile of k, rows g and g + 8 of a strip beside each other, each with
    its two groups. Where the last tile has one group, its second is 0."""
    n = 100
    k = 288
    groups = k // 32
    tiles = -(-k // 64)
    weight = random_weight(MXFP4, n, k, rng)
    data = rk.pack_weight(**weight.arguments, dtype=torch.bfloat16).data.cpu()
    codes = 2 * tiles * 64 * 64 // 2
    assert data.numel() == codes + 2 * tiles * 64 * 2
    found = data[codes:].view(2, tiles, 4, 8, 2, 2).tolist()
    scales = weight.arguments["scales"].tolist()
    for row in range(128):
        for group in range(2 * tiles):
            tile, half = divmod(group, 2)
            upper = row % 16 // 8
            got = found[row // 64][tile][row % 64 // 16][row % 8][upper][half]
            assert got == (scales[row][group] if row < n and group < groups else 0)


@pytest.mark.parametrize("power", [0, 1, 2, 127, 128, 129, 200, 245, 252])
def test_every_power_of_two(power):
    """Of every float; the least two powers are subnormal, and above 128 the kernels multiply
    twice."""
    stored = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    powers = torch.full((16, 16), power, dtype=torch.uint8)
    packed = rk.pack_weight(stored, powers, "mxfp4")
    codes = torch.stack([stored & 15, stored >> 4], dim=-1).view(16, 512).long()
    value = FLOAT4[codes] * 2.0 ** (power - 127)
    for tokens in (1, 20, 40):
        x = torch.zeros(tokens, 512, dtype=torch.bfloat16)
        x[0, ::3] = 1 if power < 246 else 2.0**-8  # so that sums are float32's
        got = rk.linear(x, packed, out_dtype=torch.float32)
        assert_close("linear mxfp4", got, x.double() @ value.T, (1e-6, 1e-6))


@pytest.mark.parametrize("k", [64, 320, 1032])
def test_large_powers_of_two_among_small_ones(k, rng):
    """Some of a warp's groups are multiplied twice, others of the same row are not."""
    weight = random_weight(MXFP4, 200, k, rng)
    scales = weight.arguments["scales"]
    scales[torch.rand(scales.shape, generator=rng) < 0.1] += 12  # 130 .. 135: 8 .. 256
    scales[0, 0] = 131
    powers = torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)[:, :k]
    packed = rk.pack_weight(**weight.arguments, dtype=torch.bfloat16)
    for tokens in (1, 9, 16, 30, 64, 200):
        x = spread((tokens, k), torch.bfloat16, rng)
        expected = x.double() @ (weight.codes * powers).T
        assert_close("linear mxfp4", rk.linear(x, packed), expected, ROUNDED)
