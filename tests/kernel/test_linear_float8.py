"""Packed 8-bit floats (e4m3) with scales: what is packed, what `linear` and the others make of
it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import radix_kernels as rk
from radix_kernels import reference
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits, guarded, integers, spread
from tests.kernel.packed_weights import CPU_LIBRARY_ONLY, TOLERANCE, assert_rows_stand_alone

pytestmark = CPU_LIBRARY_ONLY

SIZES = [(1, 34), (16, 64), (17, 32), (48, 128), (100, 7), (33, 1000), (80, 417), (15, 1)]
GROUPS = [0, 16, 32, 64, 128]
SCALES = [torch.float32, torch.float16, torch.bfloat16]
NUMBERS = [code for code in range(256) if code & 127 != 127]


def table():
    """What every code stands for, from its bits; NaN is left out as 0."""
    values = torch.zeros(256, dtype=torch.float64)
    for code in NUMBERS:
        exponent = code >> 3 & 15
        mantissa = code & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        values[code] = -size if code & 128 else size
    return values


TABLE = table()


def random_codes(n, k, rng):
    """Codes, each number as likely as another, and their values."""
    codes = torch.tensor(NUMBERS)[integers(0, len(NUMBERS), (n, k), rng)]
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), TABLE[codes]


def random_weight(n, k, group, rng, dtype=torch.float32):
    """Codes and scales as they are packed, and the elements in float64."""
    codes, values = random_codes(n, k, rng)
    groups = -(-k // group) if group else 1
    scales = (torch.rand((n, groups), generator=rng) / 64 + 2**-9).to(dtype)
    return codes, scales, values * scales.double().repeat_interleave(group or k, 1)[:, :k]


def same_codes(got, expected):
    return got.dtype == torch.float8_e4m3fn and torch.equal(
        got.view(torch.uint8), expected.view(torch.uint8)
    )


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_pack_and_unpack_keep_every_bit(n, k, group, rng):
    for dtype in SCALES:
        codes, scales, _ = random_weight(n, k, group, rng, dtype)
        packed = rk.pack_weight(codes, scales, "fp8", group=group)
        found = (packed.kind, packed.group, packed.zeros, packed.mins, packed.layout)
        assert found == ("fp8", group, False, False, "bytes16")
        got, got_scales, zeros = rk.unpack_weight(packed)
        assert same_codes(got, codes) and zeros is None
        assert_same_bits(got_scales, scales)


def test_bytes_in_memory(rng):
    codes, scales, _ = random_weight(32, 512, 0, rng)
    assert rk.pack_weight(codes, scales, "fp8").nbytes == 32 * 512 + 32 * 4
    codes, scales, _ = random_weight(32, 512, 128, rng)
    assert rk.pack_weight(codes, scales, "fp8").nbytes == 32 * 512 + 32 * 4 * 4


@pytest.mark.parametrize(("n", "k"), [(128, 128), (200, 256), (300, 200), (5, 130)])
def test_scales_of_blocks_and_of_the_whole(n, k, rng):
    codes, values = random_codes(n, k, rng)
    blocks = torch.rand((-(-n // 128), -(-k // 128)), generator=rng) + 0.5
    spread_out = blocks.repeat_interleave(128, 0)[:n]
    x = spread((3, k), torch.bfloat16, rng)
    packed = rk.pack_weight(codes, blocks, "fp8", group=128)
    assert_same_bits(rk.unpack_weight(packed)[1], spread_out)
    exact = values * spread_out.double().repeat_interleave(128, 1)[:, :k]
    assert_close(
        "linear fp8", rk.linear(x, packed), x.double() @ exact.T, TOLERANCE[torch.bfloat16]
    )
    whole = rk.pack_weight(codes, torch.tensor([0.75]), "fp8")
    expected = x.double() @ (values * 0.75).T
    assert_close("linear fp8", rk.linear(x, whole), expected, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 8, 21, 70])
def test_linear(tokens, group, dtype, rng):
    for n, k in SIZES:
        codes, scales, value = random_weight(n, k, group, rng, SCALES[k % 3])
        packed = rk.pack_weight(codes, scales, "fp8", group=group, dtype=dtype)
        x = spread((tokens, k), dtype, rng, gap=5)
        expected = x.double() @ value.T
        out = guarded((tokens, n), dtype, gap=3)
        assert rk.linear(x, packed, out=out.view) is out.view
        out.check()
        assert_close("linear fp8", out.view, expected, TOLERANCE[dtype])
        wide = rk.linear(x, packed, out_dtype=torch.float32)
        assert_close("linear fp8", wide, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_every_code_is_exact(tokens, dtype):
    """One input at a time: the product is the number itself, subnormal or not."""
    codes = torch.tensor(NUMBERS, dtype=torch.uint8)[:, None].repeat(1, 9)
    packed = rk.pack_weight(
        codes.view(torch.float8_e4m3fn), torch.ones(len(NUMBERS)), "fp8", dtype=dtype
    )
    expected = TABLE[NUMBERS].float()
    for k in range(9):
        x = torch.zeros(tokens, 9, dtype=dtype)
        x[:, k] = 1
        out = rk.linear(x, packed, out_dtype=torch.float32)
        assert torch.equal(out, expected.expand(tokens, -1))
    rows = rk.embedding(torch.arange(len(NUMBERS)), packed)
    assert_same_bits(rows, expected.to(dtype)[:, None].repeat(1, 9))


def test_large_batch(rng):
    """More rows than a task takes, and more K than stays in a cache."""
    for group, dtype in itertools.product((0, 128), (torch.bfloat16, torch.float16)):
        codes, scales, value = random_weight(40, 2500, group, rng)
        packed = rk.pack_weight(codes, scales, "fp8", group=group, dtype=dtype)
        x = spread((700, 2500), dtype, rng)
        out = rk.linear(x, packed)
        assert_close("linear fp8", out, x.double() @ value.T, TOLERANCE[dtype])
        for row in (0, 511, 699):
            assert_same_bits(rk.linear(x[row : row + 1], packed), out[row : row + 1])


@pytest.mark.parametrize("group", GROUPS)
def test_rows_and_threads_do_not_change_bits(group, rng):
    codes, scales, _ = random_weight(90, 600, group, rng)
    for dtype in FLOATS:
        packed = rk.pack_weight(codes, scales, "fp8", group=group, dtype=dtype)
        assert_rows_stand_alone(spread((70, 600), dtype, rng), packed)


@pytest.mark.parametrize("group", [0, 32])
def test_subnormal_values_have_the_same_bits_in_any_batch(group, rng):
    codes, scales, _ = random_weight(48, 256, group, rng)
    x = spread((40, 256), torch.bfloat16, rng)
    x[:, ::3] *= 1e-39
    x[1::2] *= 1e-37
    packed = rk.pack_weight(codes, scales * 1e30, "fp8", group=group)
    whole = rk.linear(x, packed)
    for begin in range(8):
        assert_same_bits(rk.linear(x[begin : begin + 1], packed), whole[begin : begin + 1])
        assert_same_bits(rk.linear(x[begin : begin + 3], packed), whole[begin : begin + 3])


def test_rows_that_are_not_finite(rng):
    codes, scales, _ = random_weight(33, 600, 128, rng)
    packed = rk.pack_weight(codes, scales, "fp8", group=128)
    for tokens in (5, 40):
        x = spread((tokens, 600), torch.bfloat16, rng)
        x[1] = 0
        clean = rk.linear(x, packed)
        assert (clean[1] == 0).all()
        for value in (math.nan, math.inf):
            x[2, 450] = value
            out = rk.linear(x, packed)
            expected = ~torch.isfinite(x[2].double() @ codes.double().T)
            assert torch.equal(~torch.isfinite(out[2]), expected)
            others = [i for i in range(tokens) if i != 2]
            assert_same_bits(out[others], clean[others])


def test_embedding(rng):
    codes, scales, value = random_weight(37, 530, 128, rng)
    for dtype, index in itertools.product(FLOATS, (torch.int32, torch.int64)):
        ids = torch.tensor([0, 36, 5, 5, 17]).to(index)
        packed = rk.pack_weight(codes, scales, "fp8", group=128, dtype=dtype)
        out = guarded((5, 530), dtype, gap=2)
        assert rk.embedding(ids, packed, out=out.view) is out.view
        out.check()
        assert torch.equal(out.view.contiguous(), value[ids.long()].float().to(dtype))


def test_argmax_and_gate(rng):
    codes, scales, value = random_weight(64, 512, 128, rng)
    packed = rk.pack_weight(codes, scales / 64, "fp8", group=128)
    value = value / 64
    for tokens in (1, 5, 40):
        x = spread((tokens, 512), torch.bfloat16, rng)
        ids, maxima = rk.linear_argmax(x, packed)
        logits = rk.linear(x, packed, out_dtype=torch.float32)
        expected_ids, expected_maxima = reference.row_argmax(logits)
        assert torch.equal(ids, expected_ids)
        assert_same_bits(maxima, expected_maxima)
        gate, up = (x.double() @ value.T).chunk(2, dim=-1)
        gated = torch.nn.functional.silu(gate) * up
        assert_close("fp8 gated", rk.linear_silu_and_mul(x, packed), gated, (5e-3, 2e-2))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_quantization_at_packing(dtype, group, rng):
    for n, k in SIZES:
        w = spread((n, k), dtype, rng)
        w[0] = 0
        codes, scales, _ = rk.unpack_weight(rk.pack_weight(w, kind="fp8", group=group))
        groups = -(-k // group) if group else 1
        parts = torch.zeros(n, groups * (group or k), dtype=torch.float32)
        parts[:, :k] = w.float()
        parts = parts.unflatten(1, (groups, -1))
        expected_scales = (parts.abs().amax(-1) / 448).to(scales.dtype)
        assert scales.dtype == (torch.bfloat16 if group else torch.float32)
        assert_same_bits(scales, expected_scales)
        wide = expected_scales.float()[..., None]
        wanted = torch.where(wide != 0, parts / wide, torch.zeros(()))
        expected = wanted.clamp(-448, 448).flatten(1)[:, :k].to(torch.float8_e4m3fn)
        assert same_codes(codes, expected)
    w[-1, -1] = math.inf
    with pytest.raises(ValueError, match="not finite"):
        rk.pack_weight(w, kind="fp8", group=group)


def test_codes_in_any_strides(rng):
    codes, scales, _ = random_weight(33, 70, 0, rng)
    turned = codes.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn).T
    packed = rk.pack_weight(turned, scales, "fp8")
    assert same_codes(rk.unpack_weight(packed)[0], codes)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_is_refused(code, rng):
    codes, scales, _ = random_weight(100, 300, 0, rng)
    codes.view(torch.uint8)[99, 299] = code
    with pytest.raises(ValueError, match="w has codes that are NaN"):
        rk.pack_weight(codes, scales, "fp8")


def test_errors(rng):
    codes, scales, _ = random_weight(300, 64, 32, rng)
    for changes, error, message in (
        ({"w": codes.view(torch.int8)}, TypeError, "w has dtype int8, expected float8_e4m3fn"),
        ({"kind": "int8"}, TypeError, "w has dtype float8_e4m3fn, expected int8"),
        ({"scales": scales.double()}, TypeError, "scales|dtype"),
        ({"scales": scales[:2]}, ValueError, "scales"),
        ({"scales": scales[:, :1]}, ValueError, "scales"),
        ({"group": 8}, ValueError, "group is 8, expected 16, 32, 64 or 128"),
        ({"zeros": torch.zeros(300, 2, dtype=torch.uint8)}, ValueError, "zero points"),
        ({"mins": scales}, ValueError, "minima are for integer codes"),
        ({"sub_scales": torch.zeros(300, 2, dtype=torch.int8)}, ValueError, "sub_scales is given"),
    ):
        arguments = {"w": codes, "scales": scales, "kind": "fp8", "group": 32}
        with pytest.raises(error, match=message):
            rk.pack_weight(**(arguments | changes))
