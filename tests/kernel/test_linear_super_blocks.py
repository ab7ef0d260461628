"""Packed weights in super-blocks of 256 inputs (GGUF's K types): what is packed, what `linear` and
the others make of it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import radix_kernels as rk
from radix_kernels import reference
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits, guarded, integers, spread
from tests.kernel.packed_weights import CPU_LIBRARY_ONLY, TOLERANCE, assert_rows_stand_alone
from tests.kernel.super_blocks import KINDS, SUPER, SuperWeight, rounded_x

pytestmark = CPU_LIBRARY_ONLY

SIZES = [(1, 256), (16, 512), (33, 1024), (48, 256), (100, 8), (17, 298), (80, 1830), (7, 18)]
SCALES = [torch.float16, torch.bfloat16, torch.float32]
FORMS = list(itertools.product(KINDS, (False, True)))
NAMES = [f"{kind}-{'mins' if has_mins else 'plain'}" for kind, has_mins in FORMS]
forms = pytest.mark.parametrize(("kind", "has_mins"), FORMS, ids=NAMES)


@forms
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_pack_and_unpack_keep_every_bit(kind, has_mins, n, k, rng):
    for scale_dtype in SCALES:
        weight = SuperWeight.random(kind, n, k, rng, has_mins=has_mins, scale_dtype=scale_dtype)
        packed = weight.pack()
        assert (packed.kind, packed.group) == (kind, KINDS[kind][2])
        assert (packed.zeros, packed.mins) == (False, has_mins)
        codes, scales, mins, sub_scales, sub_mins = rk.unpack_weight(packed)
        assert torch.equal(codes, weight.stored)
        assert_same_bits(scales, weight.scales)
        assert torch.equal(sub_scales, weight.sub_scales)
        if not has_mins:
            assert mins is None and sub_mins is None
            continue
        assert_same_bits(mins, weight.mins)
        assert torch.equal(sub_mins, weight.sub_mins)


def test_bytes_in_memory(rng):
    """A quarter of a byte a group above the codes, and half a byte above the file for Q6_K."""
    for kind, has_mins, expected in (
        ("q4_k", True, 4.625),
        ("q5_k", True, 5.625),
        ("q6_k", False, 6.625),
        ("q6_k", True, 7.125),
    ):
        weight = SuperWeight.random(kind, 32, 512, rng, has_mins=has_mins)
        assert weight.pack().nbytes * 8 / (32 * 512) == expected


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@forms
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 8, 21, 70])
def test_linear(kind, has_mins, tokens, dtype, rng):
    for n, k in SIZES:
        weight = SuperWeight.random(kind, n, k, rng, has_mins=has_mins, scale_dtype=SCALES[k % 3])
        packed = weight.pack(dtype)
        x = spread((tokens, k), dtype, rng, gap=5)
        expected = rounded_x(x) @ weight.value().T
        out = guarded((tokens, n), dtype, gap=3)
        assert rk.linear(x, packed, out=out.view) is out.view
        out.check()
        assert_close(f"linear {kind}", out.view, expected, TOLERANCE[dtype])
        wide = rk.linear(x, packed, out_dtype=torch.float32)
        assert_close(f"linear {kind}", wide, expected, TOLERANCE[torch.float32])


@forms
def test_epilogues(kind, has_mins, rng):
    weight = SuperWeight.random(kind, 64, 512, rng, has_mins=has_mins)
    packed = weight.pack(torch.float32)
    for tokens in (1, 40):
        x = spread((tokens, 512), torch.float32, rng)
        sums = rounded_x(x) @ weight.value().T
        bias = spread((64,), torch.float32, rng)
        residual = spread((tokens, 64), torch.float32, rng)
        got = rk.linear(x, packed, bias, residual=residual)
        expected = sums + bias.double() + residual.double()
        assert_close(f"linear {kind}", got, expected, TOLERANCE[torch.float32])
        gate, up = sums.chunk(2, dim=-1)
        gated = torch.nn.functional.silu(gate) * up
        got = rk.linear_silu_and_mul(x, packed)
        assert_close(f"linear_silu_and_mul {kind}", got, gated, (2e-5, 2e-4))


@pytest.mark.parametrize("kind", KINDS)
def test_large_batch(kind, rng):
    """More rows than a task takes, and more K than stays in a cache."""
    weight = SuperWeight.random(kind, 40, 2500, rng, has_mins=True)
    x = spread((700, 2500), torch.bfloat16, rng)
    packed = weight.pack()
    out = rk.linear(x, packed)
    expected = rounded_x(x) @ weight.value().T
    assert_close(f"linear {kind}", out, expected, TOLERANCE[torch.bfloat16])
    for row in (0, 511, 699):
        assert_same_bits(rk.linear(x[row : row + 1], packed), out[row : row + 1])


@forms
def test_rows_and_threads_do_not_change_bits(kind, has_mins, rng):
    for dtype in FLOATS:
        packed = SuperWeight.random(kind, 90, 600, rng, has_mins=has_mins).pack(dtype)
        assert_rows_stand_alone(spread((70, 600), dtype, rng), packed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_integer_sums_do_not_saturate(kind, tokens):
    """The largest codes and small scales of either sign against the largest codes of x."""
    least, count, group = KINDS[kind]
    n = 16
    k = 4096
    for code, sub, value in itertools.product((least, least + count - 1), (-128, 127), (-1.0, 1.0)):
        weight = SuperWeight(
            kind=kind,
            codes=torch.full((n, k), code),
            scales=torch.ones(n, k // SUPER),
            sub_scales=torch.full((n, k // group), sub, dtype=torch.int8),
            mins=torch.ones(n, k // SUPER),
            sub_mins=torch.full((n, k // group), 255, dtype=torch.uint8),
        )
        x = torch.full((tokens, k), value)
        exact = torch.full((tokens, n), value * k * (code * sub + 255), dtype=torch.float64)
        got = rk.linear(x, weight.pack(torch.float32))
        assert_close(f"linear {kind}", got, exact, (1e-6, 1e-6))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_finite(kind, rng):
    packed = SuperWeight.random(kind, 33, 600, rng, has_mins=True).pack()
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


@forms
def test_embedding(kind, has_mins, rng):
    for dtype, index in itertools.product(FLOATS, (torch.int32, torch.int64)):
        weight = SuperWeight.random(kind, 37, 530, rng, has_mins=has_mins)
        packed = weight.pack(dtype)
        ids = torch.tensor([0, 36, 5, 5, 17]).to(index)
        out = guarded((5, 530), dtype, gap=2)
        assert rk.embedding(ids, packed, out=out.view) is out.view
        out.check()
        # The element is rounded to float32 first.
        expected = weight.value()[ids.long()].float().to(dtype)
        assert_same_bits(out.view.contiguous(), expected)
        with pytest.raises(ValueError, match="ids"):
            rk.embedding(torch.tensor([37]), packed)


@forms
def test_argmax(kind, has_mins, rng):
    packed = SuperWeight.random(kind, 333, 512, rng, has_mins=has_mins).pack()
    for tokens in (1, 5, 40):
        x = spread((tokens, 512), torch.bfloat16, rng)
        ids, maxima = rk.linear_argmax(x, packed)
        logits = rk.linear(x, packed, out_dtype=torch.float32)
        expected_ids, expected_maxima = reference.row_argmax(logits)
        assert torch.equal(ids, expected_ids)
        assert_same_bits(maxima, expected_maxima)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 30])
def test_experts(kind, tokens, rng):
    """The call for all experts has the bits of single products."""
    experts = 3
    first = [SuperWeight.random(kind, 512, 256, rng, has_mins=True) for _ in range(experts)]
    second = [SuperWeight.random(kind, 256, 256, rng, has_mins=True) for _ in range(experts)]
    packed = rk.PackedExperts(w1=tuple(w.pack() for w in first), w2=tuple(w.pack() for w in second))
    x = spread((tokens, 256), torch.bfloat16, rng) / 64
    ids = integers(0, experts, (tokens, 1), rng).to(torch.int32)
    weights = torch.rand(tokens, 1, generator=rng)
    got = rk.fused_experts_packed(x, packed, weights, ids)
    for token, expert in enumerate(ids[:, 0].tolist()):
        row = x[token : token + 1]
        down = packed.down_product(expert, packed.gated_product(expert, row))
        expected = (weights[token] * down.float()).bfloat16()
        assert_same_bits(got[token : token + 1], expected)


def test_errors(rng):
    weight = SuperWeight.random("q6_k", 6, 256, rng, has_mins=False)

    def pack(**changes):
        arguments = {
            "w": weight.stored,
            "scales": weight.scales,
            "kind": "q6_k",
            "sub_scales": weight.sub_scales,
        }
        return rk.pack_weight(**(arguments | changes))

    pack()
    small = weight.sub_scales
    for changes, error, message in (
        ({"w": weight.stored.view(torch.uint8)}, TypeError, "w has dtype uint8"),
        ({"w": torch.full_like(weight.stored, 32)}, ValueError, "code 32 .* expected -32 to 31"),
        ({"w": torch.full_like(weight.stored, -33)}, ValueError, "code -33 .* expected -32 to 31"),
        ({"kind": "q5_k", "sub_scales": small[:, :8]}, ValueError, "expected 0 to 31"),
        ({"kind": "q4_k"}, TypeError, "w has dtype int8"),
        ({"scales": None}, ValueError, "scales is None"),
        ({"scales": torch.ones(6, 2).half()}, ValueError, "scales"),
        ({"sub_scales": None}, ValueError, "sub_scales is None, expected an array"),
        ({"sub_scales": small[:, :15]}, ValueError, "sub_scales"),
        ({"sub_scales": small.view(torch.uint8)}, TypeError, "sub_scales"),
        ({"sub_mins": small.view(torch.uint8)}, ValueError, "sub_mins is given, expected None"),
        ({"mins": weight.scales}, ValueError, "sub_mins is None, expected an array"),
        ({"mins": weight.scales, "sub_mins": small}, TypeError, "sub_mins"),
        ({"zeros": small.view(torch.uint8)}, ValueError, "zero points"),
        ({"group": 32}, ValueError, "group is 32, expected 16"),
        ({"kind": "w8a8"}, ValueError, "sub_scales is given, expected None"),
    ):
        with pytest.raises(error, match=message):
            pack(**changes)
    with pytest.raises(ValueError, match="sub_scales is given, but a dense weight has none"):
        rk.pack_weight(weight.stored.float(), sub_scales=weight.sub_scales)
