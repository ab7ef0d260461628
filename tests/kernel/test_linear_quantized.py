"""Packed int8 and int4 weights: what is packed, what `linear` and `embedding` make of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

import radix_kernels as rk
from radix_kernels import reference
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits, guarded, integers, spread
from tests.kernel.packed_weights import CPU_LIBRARY_ONLY, TOLERANCE, assert_rows_stand_alone

pytestmark = CPU_LIBRARY_ONLY

SIZES = [(1, 34), (15, 30), (16, 64), (17, 34), (48, 128), (100, 8), (33, 1000), (80, 418)]
SCALES = [torch.float32, torch.float16, torch.bfloat16]
# (kind, group, what the elements of a group are counted from, where it differs)
KINDS = [
    *itertools.product(("int8", "w8a8"), (0, 16, 32, 64, 128), ("", "mins")),
    *itertools.product(("int4", "w4a8"), (32, 64, 128), ("", "zeros", "mins")),
]
NAMES = [f"{kind}-{group}-{origin or 'plain'}" for kind, group, origin in KINDS]


@dataclass
class Weight:
    """Random codes, scales and zeros or mins, as `pack_weight` takes them and as a float64
    matrix."""

    kind: str
    group: int
    codes: torch.Tensor  # [N, K], any integers
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    mins: torch.Tensor | None = None

    @classmethod
    def random(cls, kind, group, origin, n, k, rng, scale_dtype=torch.float32):
        small = kind in ("int4", "w4a8")
        groups = -(-k // group) if group else 1
        codes = integers(0, 16, (n, k), rng) if small else integers(-128, 128, (n, k), rng)
        scales = (torch.rand((n, groups), generator=rng) / 64 + 2**-9).to(scale_dtype)
        points = integers(0, 17, (n, groups), rng).to(torch.uint8) if origin == "zeros" else None
        mins = None
        if origin == "mins":
            mins = ((torch.rand((n, groups), generator=rng) - 0.8) / 8).to(scale_dtype)
        return cls(kind, group, codes, scales, points, mins)

    @property
    def stored(self) -> torch.Tensor:
        if self.kind not in ("int4", "w4a8"):
            return self.codes.to(torch.int8)
        even = self.codes[:, ::2]
        odd = self.codes[:, 1::2]
        return (even | odd << 4).to(torch.uint8)

    def pack(self, dtype=torch.bfloat16) -> rk.PackedWeight:
        return rk.pack_weight(
            self.stored,
            self.scales,
            self.kind,
            zeros=self.zeros,
            mins=self.mins,
            group=self.group,
            dtype=dtype,
        )

    def value(self) -> torch.Tensor:
        zeros = self.zeros
        if zeros is None and self.mins is None and self.kind in ("int4", "w4a8"):
            zeros = torch.full_like(self.scales, 8)
        return reference.dequantize_weight(self.codes, self.scales, zeros, self.group, self.mins)

    def x(self, x: torch.Tensor) -> torch.Tensor:
        """x as the kind takes it, in float64."""
        if self.kind in ("int8", "int4"):
            return x.double()
        codes, scales = reference.quantize_rows(x, self.group)
        return reference.dequantize_weight(codes, scales, None, self.group)


@pytest.mark.parametrize(("kind", "group", "origin"), KINDS, ids=NAMES)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_pack_and_unpack_keep_every_bit(kind, group, origin, n, k, rng):
    for scale_dtype in SCALES:
        weight = Weight.random(kind, group, origin, n, k, rng, scale_dtype)
        packed = weight.pack()
        assert (packed.kind, packed.group) == (kind, group)
        assert (packed.zeros, packed.mins) == (origin == "zeros", origin == "mins")
        assert packed.data.dtype == torch.uint8 and packed.nbytes == packed.data.numel()
        codes, scales, counted_from = rk.unpack_weight(packed)
        assert torch.equal(codes, weight.stored)
        assert_same_bits(scales, weight.scales)
        expected = {"zeros": weight.zeros, "mins": weight.mins}.get(origin)
        assert counted_from is expected is None or torch.equal(counted_from, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("kind", "group", "origin"), KINDS, ids=NAMES)
@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 21, 70])
def test_linear(kind, group, origin, tokens, dtype, rng):
    for n, k in SIZES:
        weight = Weight.random(kind, group, origin, n, k, rng, SCALES[k % 3])
        packed = weight.pack(dtype)
        x = spread((tokens, k), dtype, rng, gap=5)
        bias = spread((n,), torch.float32, rng)
        if tokens * n == 1:  # a lone sum that cancels would say nothing
            x = x.abs().copysign(weight.value().to(dtype))
            bias = bias.abs()
        expected = weight.x(x) @ weight.value().T
        out = guarded((tokens, n), dtype, gap=3)
        assert rk.linear(x, packed, out=out.view) is out.view
        out.check()
        assert_close(f"linear {kind}", out.view, expected, TOLERANCE[dtype])
        assert_close(
            f"linear {kind}", rk.linear(x, packed, bias), expected + bias.double(), TOLERANCE[dtype]
        )
        wide = rk.linear(x, packed, out_dtype=torch.float32)
        assert_close(f"linear {kind}", wide, expected, TOLERANCE[torch.float32])


def test_large_batch(rng):
    """More rows than a task takes, and more K than stays in a cache."""
    for kind, group in (("int8", 0), ("w8a8", 0), ("w8a8", 32), ("int4", 128), ("w4a8", 32)):
        weight = Weight.random(kind, group, "", 40, 2500, rng)
        x = spread((700, 2500), torch.bfloat16, rng)
        expected = weight.x(x) @ weight.value().T
        packed = weight.pack()
        out = rk.linear(x, packed)
        assert_close(f"linear {kind}", out, expected, TOLERANCE[torch.bfloat16])
        for row in (0, 511, 699):
            assert_same_bits(rk.linear(x[row : row + 1], packed), out[row : row + 1])


@pytest.mark.parametrize(("kind", "group", "origin"), KINDS, ids=NAMES)
def test_rows_and_threads_do_not_change_bits(kind, group, origin, rng):
    for dtype in FLOATS:
        packed = Weight.random(kind, group, origin, 90, 200, rng).pack(dtype)
        assert_rows_stand_alone(spread((70, 200), dtype, rng), packed)


@pytest.mark.parametrize(("kind", "group"), [("int8", 0), ("int8", 32), ("int4", 64)])
def test_subnormal_values_have_the_same_bits_in_any_batch(kind, group, rng):
    """Tiles take them as zero; so must what stands in for tiles when rows are few."""
    weight = Weight.random(kind, group, "zeros" if kind == "int4" else "", 48, 256, rng)
    weight.scales *= 1e30
    x = spread((40, 256), torch.bfloat16, rng)
    x[:, ::3] *= 1e-39
    x[1::2] *= 1e-37
    packed = weight.pack()
    whole = rk.linear(x, packed)
    for begin in range(8):
        assert_same_bits(rk.linear(x[begin : begin + 1], packed), whole[begin : begin + 1])
        assert_same_bits(rk.linear(x[begin : begin + 3], packed), whole[begin : begin + 3])


@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
def test_integer_sums_do_not_saturate(kind, group, tokens):
    """The largest codes of either sign against the largest codes of x, over many K."""
    k = 4096
    for code, x_value in itertools.product((-128, 127) if kind == "w8a8" else (0, 15), (-1.0, 1.0)):
        codes = torch.full((16, k), code)
        weight = Weight(
            kind=kind, group=group, codes=codes, scales=torch.ones(16, k // group), zeros=None
        )
        x = torch.full((tokens, k), x_value)
        value = code if kind == "w8a8" else code - 8
        exact = torch.full((tokens, 16), float(value * k), dtype=torch.float64) * x_value
        assert_close(
            f"linear {kind}", rk.linear(x, weight.pack(torch.float32)), exact, (1e-6, 1e-6)
        )


@pytest.mark.parametrize("kind", ["int8", "int4", "w8a8", "w4a8"])
def test_rows_that_are_not_finite(kind, rng):
    weight = Weight.random(kind, 64, "", 33, 200, rng)
    for tokens in (5, 40):
        x = spread((tokens, 200), torch.bfloat16, rng)
        x[1] = 0
        clean = rk.linear(x, weight.pack())
        assert (clean[1] == 0).all()
        for value in (math.nan, math.inf):
            x[2, 150] = value
            out = rk.linear(x, weight.pack())
            assert not torch.isfinite(out[2]).any()
            others = [i for i in range(tokens) if i != 2]
            assert_same_bits(out[others], clean[others])


# What else in memory lies between the elements of a weight.
STRIDES = {
    "rows": lambda w: w,
    "rows apart": lambda w: torch.cat([w, w], dim=1)[:, : w.shape[1]],
    "columns": lambda w: w.t().contiguous().t(),
    "every third": lambda w: w.repeat_interleave(3, dim=1)[:, ::3],
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_quantization_at_packing(dtype, bits, group, strides, rng):
    if bits == 4 and not group:
        pytest.skip("4 bits need groups")
    for n, k in [*SIZES, (5, 7), (17, 1700)]:
        w = spread((n, k), dtype, rng)
        w[0] = 0
        # Many largest ones: of both signs the first decides.
        w[1::3] = torch.randint(-3, 4, w[1::3].shape, generator=rng).to(dtype)
        kind = {8: "int8", 4: "int4"}[bits]
        packed = rk.pack_weight(STRIDES[strides](w), kind=kind, group=group)
        codes, scales = reference.quantize_weight(w, bits, group)
        got, got_scales, _ = rk.unpack_weight(packed)
        if bits == 4:
            got = torch.stack([got & 15, got >> 4], dim=-1).flatten(1)[:, :k]
        assert torch.equal(got.to(torch.int16), codes)
        assert_same_bits(got_scales, scales)
        assert packed.dtype == str(dtype)[6:]
        zeros = torch.full_like(scales, 8) if bits == 4 else None
        error = (reference.dequantize_weight(codes, scales, zeros, group) - w.double()).abs()
        # Half a step; a whole one where +8 is cut to +7; the rounding of the scale on top.
        step = scales.double().abs().repeat_interleave(group or k, 1)[:, :k]
        assert (error <= step * (0.51 if bits == 8 else 1.05)).all()


def test_values_that_cannot_be_quantized(rng):
    for value in (math.nan, math.inf, -math.inf):
        for dtype in FLOATS:
            w = spread((300, 1037), dtype, rng)
            w[299, 0] = w[170, 3] = w[117, 1036] = value  # blocks of several threads
            for kind in ("int8", "int4", "fp8"):
                with pytest.raises(ValueError, match="row 117 "):
                    rk.pack_weight(w, kind=kind)


@pytest.mark.parametrize(("kind", "group", "origin"), KINDS, ids=NAMES)
def test_embedding(kind, group, origin, rng):
    for dtype, index in itertools.product(FLOATS, (torch.int32, torch.int64)):
        weight = Weight.random(kind, group, origin, 37, 90, rng)
        packed = weight.pack(dtype)
        ids = torch.tensor([0, 36, 5, 5, 17]).to(index)
        out = guarded((5, 90), dtype, gap=2)
        assert rk.embedding(ids, packed, out=out.view) is out.view
        out.check()
        # The element is rounded to float32 first.
        expected = weight.value()[ids.long()].float().to(dtype)
        assert_same_bits(out.view.contiguous(), expected)
        with pytest.raises(ValueError, match="ids"):
            rk.embedding(torch.tensor([37]), packed)


def test_errors(rng):
    codes = torch.zeros(6, 64, dtype=torch.int8)
    scales = torch.ones(6)
    small = codes.view(torch.uint8)
    with pytest.raises(TypeError, match="w"):
        rk.pack_weight(small, scales, "int8")
    with pytest.raises(TypeError, match="w"):
        rk.pack_weight(codes, scales, "int4")
    with pytest.raises(TypeError, match="scales|dtype"):
        rk.pack_weight(codes, scales.double(), "int8")
    with pytest.raises(ValueError, match="scales"):
        rk.pack_weight(codes, torch.ones(5), "int8")
    with pytest.raises(ValueError, match="group"):
        rk.pack_weight(codes, torch.ones(6, 3), "int8")
    with pytest.raises(ValueError, match="group is 16, expected 32, 64 or 128"):
        rk.pack_weight(small, torch.ones(6, 8), "int4", group=16)
    with pytest.raises(ValueError, match="group is 8, expected 16, 32"):
        rk.pack_weight(codes, torch.ones(6, 8), "int8", group=8)
    with pytest.raises(ValueError, match="group"):
        rk.pack_weight(torch.ones(6, 64), kind="int4", group=0)
    with pytest.raises(ValueError, match="zero"):
        rk.pack_weight(codes, scales, "int8", zeros=torch.zeros(6, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="zeros"):
        rk.pack_weight(
            small,
            torch.ones(6, 1),
            "int4",
            group=128,
            zeros=torch.full((6, 1), 17, dtype=torch.uint8),
        )
    with pytest.raises(ValueError, match="zeros"):
        rk.pack_weight(torch.ones(6, 64), kind="int4", zeros=torch.zeros(6, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="mins"):
        rk.pack_weight(torch.ones(6, 64), kind="int4", mins=torch.zeros(6, 1))
    with pytest.raises(ValueError, match="mins"):
        rk.pack_weight(codes.float(), mins=scales)
    with pytest.raises(ValueError, match="mins"):
        rk.pack_weight(codes, scales, "int8", mins=torch.ones(6, 2))
    with pytest.raises(TypeError, match="mins"):
        rk.pack_weight(codes, scales, "int8", mins=scales.bfloat16())
    with pytest.raises(ValueError, match="zero points or minima, not both"):
        zeros = torch.zeros(6, 1, dtype=torch.uint8)
        rk.pack_weight(small, torch.ones(6, 1), "int4", group=128, zeros=zeros, mins=zeros.float())
    packed = rk.pack_weight(codes, scales, "int8")
    with pytest.raises(TypeError):
        rk.linear(torch.ones(2, 64), packed)
    with pytest.raises(ValueError, match="x"):
        rk.linear(torch.ones(2, 63).bfloat16(), packed)
