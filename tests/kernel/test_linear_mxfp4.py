"""Packed 4-bit floats (e2m1) with powers of two (e8m0): what is packed, what `linear` and the
others make of it."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from radix_kernels import reference
from tests.kernel.code_weights import FLOAT4
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits, guarded, integers, spread
from tests.kernel.packed_weights import CPU_LIBRARY_ONLY, TOLERANCE, assert_rows_stand_alone

pytestmark = CPU_LIBRARY_ONLY

SIZES = [(1, 34), (16, 64), (17, 32), (48, 128), (100, 8), (33, 1000), (80, 418), (15, 2)]


def random_weight(n, k, rng, low=112, high=124):
    """Codes as they are packed, powers as codes, and the elements in float64."""
    codes = integers(0, 16, (n, k), rng)
    powers = integers(low, high, (n, -(-k // 32)), rng).to(torch.uint8)
    stored = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    factors = torch.exp2(powers.double() - 127).repeat_interleave(32, 1)[:, :k]
    return stored, powers, FLOAT4[codes] * factors


def rounded_x(x):
    codes, scales = reference.quantize_rows(x, 32)
    return reference.dequantize_weight(codes, scales, None, 32)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_pack_and_unpack_keep_every_bit(n, k, rng):
    stored, powers, _ = random_weight(n, k, rng, 0, 253)
    packed = rk.pack_weight(stored, powers, "mxfp4")
    assert (packed.kind, packed.group, packed.zeros, packed.mins) == ("mxfp4", 32, False, False)
    codes, scales, zeros = rk.unpack_weight(packed)
    assert torch.equal(codes, stored) and torch.equal(scales, powers) and zeros is None


def test_bytes_in_memory(rng):
    stored, powers, _ = random_weight(32, 512, rng)
    assert rk.pack_weight(stored, powers, "mxfp4").nbytes * 8 / (32 * 512) == 4.25


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 8, 21, 70])
def test_linear(tokens, dtype, rng):
    for n, k in SIZES:
        stored, powers, value = random_weight(n, k, rng)
        packed = rk.pack_weight(stored, powers, "mxfp4", dtype=dtype)
        x = spread((tokens, k), dtype, rng, gap=5)
        expected = rounded_x(x) @ value.T
        out = guarded((tokens, n), dtype, gap=3)
        assert rk.linear(x, packed, out=out.view) is out.view
        out.check()
        assert_close("linear mxfp4", out.view, expected, TOLERANCE[dtype])
        wide = rk.linear(x, packed, out_dtype=torch.float32)
        assert_close("linear mxfp4", wide, expected, TOLERANCE[torch.float32])


def test_rows_and_threads_do_not_change_bits(rng):
    stored, powers, _ = random_weight(90, 600, rng)
    for dtype in FLOATS:
        packed = rk.pack_weight(stored, powers, "mxfp4", dtype=dtype)
        assert_rows_stand_alone(spread((70, 600), dtype, rng), packed)


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
@pytest.mark.parametrize("power", [0, 1, 2, 127, 200])
def test_every_power_of_two(power, tokens):
    """Of the largest float of either sign; the least two powers are subnormal."""
    k = 4096
    for code, value in ((7, 6.0), (15, -6.0)):
        stored = torch.full((16, k // 2), code | code << 4, dtype=torch.uint8)
        powers = torch.full((16, k // 32), power, dtype=torch.uint8)
        packed = rk.pack_weight(stored, powers, "mxfp4", dtype=torch.float32)
        x = torch.full((tokens, k), 127.0)
        exact = torch.full((tokens, 16), value * k * 127 * 2.0 ** (power - 127)).double()
        assert_close("linear mxfp4", rk.linear(x, packed), exact, (1e-6, 1e-6))


def test_rows_that_are_not_finite(rng):
    stored, powers, _ = random_weight(33, 600, rng)
    packed = rk.pack_weight(stored, powers, "mxfp4")
    for tokens in (5, 40):
        x = spread((tokens, 600), torch.bfloat16, rng)
        x[1] = 0
        clean = rk.linear(x, packed)
        assert (clean[1] == 0).all()
        for value in (math.nan, math.inf):
            x[2, 450] = value
            out = rk.linear(x, packed)
            assert not torch.isfinite(out[2]).any()
            others = [i for i in range(tokens) if i != 2]
            assert_same_bits(out[others], clean[others])


def test_embedding(rng):
    stored, powers, value = random_weight(37, 530, rng, 0, 253)
    ids = torch.tensor([0, 36, 5, 5, 17])
    for dtype in FLOATS:
        packed = rk.pack_weight(stored, powers, "mxfp4", dtype=dtype)
        out = guarded((5, 530), dtype, gap=2)
        assert rk.embedding(ids, packed, out=out.view) is out.view
        out.check()
        got = out.view.contiguous()
        assert torch.equal(got, value[ids].float().to(dtype))


def test_argmax_and_gate(rng):
    stored, powers, value = random_weight(64, 512, rng)
    packed = rk.pack_weight(stored, powers, "mxfp4")
    for tokens in (1, 5, 40):
        x = spread((tokens, 512), torch.bfloat16, rng)
        ids, maxima = rk.linear_argmax(x, packed)
        logits = rk.linear(x, packed, out_dtype=torch.float32)
        expected_ids, expected_maxima = reference.row_argmax(logits)
        assert torch.equal(ids, expected_ids)
        assert_same_bits(maxima, expected_maxima)
        gate, up = (rounded_x(x) @ value.T).chunk(2, dim=-1)
        gated = torch.nn.functional.silu(gate) * up
        assert_close("mxfp4 gated", rk.linear_silu_and_mul(x, packed), gated, (5e-3, 2e-2))


def test_errors(rng):
    stored, powers, _ = random_weight(6, 64, rng)
    for changes, error, message in (
        ({"w": stored.view(torch.int8)}, TypeError, "w has dtype int8"),
        ({"scales": None}, ValueError, "scales is None"),
        ({"scales": powers.float()}, TypeError, "scales"),
        ({"scales": powers[:, :1]}, ValueError, "scales"),
        ({"scales": torch.full_like(powers, 253)}, ValueError, "code 253, expected 0 to 252"),
        ({"group": 64}, ValueError, "group is 64, expected 32"),
        ({"zeros": powers}, ValueError, "zero points"),
        ({"mins": powers}, ValueError, "minima"),
        ({"sub_scales": powers.view(torch.int8)}, ValueError, "sub_scales is given"),
        ({"kind": "w4a8"}, TypeError, "expected bfloat16, float16 or float32|none of bfloat16"),
    ):
        arguments = {"w": stored, "scales": powers, "kind": "mxfp4"}
        with pytest.raises(error, match=message):
            rk.pack_weight(**(arguments | changes))
