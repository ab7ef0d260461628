"""Weights of codes on GPUs: how they are packed, and Triton's products with them against float64 of
what the codes stand for; in Triton's interpreter, or on the GPU that is there."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _dispatch, _loader, reference
from radix_kernels.codes_layout import CODES_LAYOUT
from tests.kernel.code_weights import FORMS, random_weight
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits, guarded, spread
from tests.kernel.triton_device import DEVICE, INTERPRETED, need_triton

need_triton()

# Float32 sums over a group, scaled, one rounding. The interpreter cuts to bfloat16.
TOLERANCE = {
    torch.float32: (3e-6, 2e-5),
    torch.float16: (4e-4, 1e-3),
    torch.bfloat16: (8e-3, 1.2e-2) if INTERPRETED else (3e-3, 4.5e-3),
}
# (N, K): one row, odd numbers, tails of tiles, of groups and of both.
SIZES = [(1, 34), (17, 32), (48, 128), (33, 418), (80, 130), (130, 96)]

pytestmark = [
    pytest.mark.cover("values"),
    pytest.mark.cpu_only,  # `--device` moves the public ops alone
    pytest.mark.usefixtures("interpreter_widens_bfloat16"),
]


@pytest.fixture(autouse=True)
def _through_triton(monkeypatch):
    """The public ops choose as on a GPU that the library has no kernel for."""
    monkeypatch.setattr(_loader, "bind", None)
    monkeypatch.setattr(_dispatch, "_GPUS", ("cpu", "cuda", "rocm"))
    rk.set_fallback("error")
    _dispatch.choose_anew()
    yield
    _dispatch.choose_anew()


def on_device(x: torch.Tensor) -> torch.Tensor:
    """x with its strides, and what lies between its rows, on the device."""
    if DEVICE == "cpu":
        return x
    base = x if x._base is None else x._base
    return base.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())


def poisoned(packed: rk.PackedWeight) -> rk.PackedWeight:
    """The same among bytes of which every number is NaN or far away."""
    size = packed.data.shape[0]
    data = torch.full((size + 512,), 0xFF, dtype=torch.uint8, device=packed.data.device)
    data[256 : size + 256] = packed.data
    values = {name: getattr(packed, name) for name in packed.__dataclass_fields__}
    return rk.PackedWeight(**(values | {"data": data[256 : size + 256]}))


@pytest.mark.parametrize(("kind", "group", "origin"), FORMS, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES, ids=str)
def test_pack_and_unpack_keep_every_bit(kind, group, origin, n, k, rng):
    weight = random_weight(kind, group, origin, n, k, rng)
    packed = weight.pack(torch.bfloat16, DEVICE)
    assert packed.layout == CODES_LAYOUT and packed.shape == (n, k)
    assert (packed.kind, packed.group) == (kind, group)
    assert (packed.zeros, packed.mins) == (origin == "zeros", origin == "mins")
    codes, scales, more = rk.unpack_weight(packed)
    assert torch.equal(codes.cpu(), weight.arguments["w"])
    assert torch.equal(scales.cpu(), weight.arguments["scales"])
    if origin:
        assert torch.equal(more.cpu(), weight.arguments[origin])
    else:
        assert more is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("kind", "group", "origin"), FORMS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7, 16, 21, 70, 130])
def test_linear(kind, group, origin, rows, dtype, rng):
    for n, k in SIZES if rows == 7 else SIZES[3:5]:
        weight = random_weight(kind, group, origin, n, k, rng)
        packed = poisoned(weight.pack(dtype, DEVICE))
        x = spread((rows, k), dtype, rng, gap=5)
        expected = x.double() @ weight.value.T
        out = guarded((rows, n), dtype, gap=3)
        there = on_device(out.view)
        assert rk.linear(on_device(x), packed, out=there) is there
        out.view.copy_(there)
        out.check()
        assert_close("linear codes", out.view, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("kind", "group", "origin"), FORMS[::3], ids=str)
def test_ends(kind, group, origin, dtype, rng):
    """Bias, residual, both of any strides and of more dimensions than two; wide results."""
    n, k = 50, 132
    weight = random_weight(kind, group, origin, n, k, rng)
    packed = weight.pack(dtype, DEVICE)
    x = spread((3, 2, k), dtype, rng)
    product = x.double() @ weight.value.T
    bias = torch.randn(n, generator=rng)
    residual = spread((3, 2, n), dtype, rng, gap=6)
    for given in (bias, bias.to(dtype)):
        got = rk.linear(on_device(x), packed, given.to(DEVICE), residual=on_device(residual))
        expected = product + given.double() + residual.double()
        assert_close("linear codes", got.cpu(), expected, TOLERANCE[dtype])
    wide = rk.linear(on_device(x), packed, bias.to(DEVICE), out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_close("linear codes", wide.cpu(), product + bias.double(), TOLERANCE[torch.float32])
    same = residual.clone().to(DEVICE)
    assert rk.linear(on_device(x), packed, residual=same, out=same) is same
    assert_close("linear codes", same.cpu(), product + residual.double(), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("kind", "group", "origin"), FORMS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_gate(kind, group, origin, dtype, interleaved, rng):
    for features in (16, 37, 80):
        weight = random_weight(kind, group, origin, 2 * features, 98, rng)
        packed = poisoned(weight.pack(dtype, DEVICE))
        x = spread((21, 98), dtype, rng, gap=2)
        both = x.double() @ weight.value.T
        gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)
        expected = gate * torch.sigmoid(gate) * up
        out = guarded((21, features), dtype, gap=3)
        there = on_device(out.view)
        rk.linear_silu_and_mul(on_device(x), packed, interleaved=interleaved, out=there)
        out.view.copy_(there)
        out.check()
        # Outputs are small where gate or up is; 16-bit ones were rounded where nothing is fused.
        assert_close("codes gated", out.view, expected, (2 * TOLERANCE[dtype][0], 0.04))


@pytest.mark.parametrize(("kind", "group", "origin"), FORMS, ids=str)
def test_embedding_and_argmax(kind, group, origin, rng):
    weight = random_weight(kind, group, origin, 37, 90, rng)
    for dtype in FLOATS:
        packed = weight.pack(dtype, DEVICE)
        ids = torch.tensor([0, 36, 5, 5, 17], device=DEVICE, dtype=torch.int32)
        out = guarded((5, 90), dtype, gap=2)
        there = on_device(out.view)
        assert rk.embedding(ids, packed, out=there) is there
        out.view.copy_(there)
        out.check()
        expected = weight.value[ids.cpu().long()].float().to(dtype)
        assert_same_bits(out.view.contiguous(), expected)
        x = on_device(spread((4, 90), dtype, rng))
        found, maxima = rk.linear_argmax(x, packed)
        logits = rk.linear(x, packed, out_dtype=torch.float32)
        wanted, largest = reference.row_argmax(logits)
        assert torch.equal(found, wanted)
        assert_same_bits(maxima.cpu(), largest.cpu())


@pytest.mark.parametrize("power", [0, 1, 2, 127, 200])
def test_every_power_of_two(power):
    """Of the largest float of either sign; the least two powers are subnormal."""
    for code, value in ((7, 6.0), (15, -6.0), (1, 0.5)):
        stored = torch.full((16, 64), code | code << 4, dtype=torch.uint8, device=DEVICE)
        powers = torch.full((16, 4), power, dtype=torch.uint8, device=DEVICE)
        packed = rk.pack_weight(stored, powers, "mxfp4", dtype=torch.float32)
        x = torch.full((3, 128), 127.0, device=DEVICE)
        exact = torch.full((3, 16), value * 128 * 127 * 2.0 ** (power - 127)).double()
        assert_close("linear codes", rk.linear(x, packed).cpu(), exact, (1e-6, 1e-6))


def test_rows_that_are_not_finite(rng):
    weight = random_weight("int4", 64, "zeros", 33, 600, rng)
    packed = weight.pack(torch.bfloat16, DEVICE)
    for tokens in (5, 40):
        x = spread((tokens, 600), torch.bfloat16, rng)
        clean = rk.linear(on_device(x), packed).cpu()
        for value in (math.nan, math.inf):
            x[2, 450] = value
            out = rk.linear(on_device(x), packed).cpu()
            assert not torch.isfinite(out[2]).any()
            others = [i for i in range(tokens) if i != 2]
            assert_same_bits(out[others], clean[others])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("kind", "group"), [("int8", 0), ("int8", 32), ("int4", 64), ("int4", 0)])
def test_quantized_here(kind, group, dtype, rng):
    """As the CPU's library quantizes: the reference has it."""
    for n, k in ((1, 1), (33, 77), (20, 130)):
        w = spread((n, k), dtype, rng)
        packed = rk.pack_weight(w.to(DEVICE), kind=kind, group=group)
        codes, scales = reference.quantize_weight(w, 8 if kind == "int8" else 4, group)
        found, found_scales, more = rk.unpack_weight(packed)
        assert more is None and packed.dtype == str(dtype).removeprefix("torch.")
        assert torch.equal(found_scales.cpu(), scales)
        if kind == "int4":
            pairs = found.cpu()
            found = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)[:, :k]
        assert torch.equal(found.cpu().to(torch.int16), codes)
        x = spread((5, k), dtype, rng)
        value = codes.double() - (8 if kind == "int4" else 0)
        value = reference.dequantize_weight(value, scales, None, group)
        got = rk.linear(on_device(x), packed).cpu()
        assert_close("linear codes", got, x.double() @ value.T, TOLERANCE[dtype])
    w[0, 1] = math.nan
    with pytest.raises(ValueError, match="row 0"):
        rk.pack_weight(w.to(DEVICE), kind=kind, group=group)


def test_errors(rng):
    codes = torch.zeros(6, 64, dtype=torch.int8, device=DEVICE)
    small = codes.view(torch.uint8)
    scales = torch.ones(6, 1, device=DEVICE)
    bytes_ = torch.zeros(6, 1, dtype=torch.uint8, device=DEVICE)
    for changes, error, message in (
        ({"kind": "w8a8"}, NotImplementedError, "no kernel on a GPU, which has int8, int4, mxfp4"),
        ({"kind": "q4_k"}, NotImplementedError, "no kernel on a GPU"),
        ({"w": small}, TypeError, "w has dtype uint8"),
        ({"scales": scales.double()}, TypeError, "scales"),
        ({"scales": scales[:5]}, ValueError, "scales has shape"),
        ({"scales": scales.repeat(1, 8), "group": 8}, ValueError, "group is 8"),
        ({"zeros": bytes_}, ValueError, "int8 has no zero points"),
        ({"mins": scales.bfloat16()}, TypeError, "mins"),
        ({"mins": scales[:5]}, ValueError, "mins"),
        (
            {"w": small, "kind": "int4", "group": 128, "zeros": bytes_ + 17},
            ValueError,
            "zeros has the value 17, expected 0 to 16",
        ),
        (
            {"w": small, "kind": "int4", "group": 128, "zeros": bytes_, "mins": scales},
            ValueError,
            "not both",
        ),
        (
            {"w": small, "kind": "mxfp4", "scales": bytes_.repeat(1, 4) + 253},
            ValueError,
            "scales has the value 253, expected 0 to 252",
        ),
        ({"w": small, "kind": "mxfp4", "scales": bytes_}, ValueError, "scales has shape"),
    ):
        arguments = {"w": codes, "scales": scales, "kind": "int8"}
        with pytest.raises(error, match=message):
            rk.pack_weight(**(arguments | changes))
    packed = rk.pack_weight(codes, scales, "int8")
    x = torch.ones(2, 64, dtype=torch.bfloat16, device=DEVICE)
    for given, options, error, message in (
        ((x.float(), packed), {}, TypeError, "x has dtype"),
        ((x[:, 1:], packed), {}, ValueError, "x has last dimension 63"),
        ((x, packed, x[0, :5]), {}, ValueError, "bias"),
        ((x, packed), {"residual": x}, ValueError, "residual"),
        ((x, packed), {"out": x}, ValueError, "out"),
    ):
        with pytest.raises(error, match=message):
            rk.linear(*given, **options)


def test_without_triton_the_reference_runs(monkeypatch, rng):
    monkeypatch.setattr(_dispatch, "triton_installed", lambda: False)
    rk.set_fallback("reference")
    weight = random_weight("int4", 32, "zeros", 34, 70, rng)
    packed = weight.pack(torch.bfloat16, DEVICE)
    x = on_device(spread((3, 70), torch.bfloat16, rng))
    exact = x.cpu().double() @ weight.value.T
    assert_close("linear", rk.linear(x, packed).cpu(), exact, (3e-3, 4.5e-3))
    gate, up = exact.chunk(2, -1)
    got = rk.linear_silu_and_mul(x, packed)
    assert_close("gated", got.cpu(), gate * torch.sigmoid(gate) * up, (6e-3, 0.04))
    rk.set_fallback("error")
    with pytest.raises(RuntimeError, match="linear_codes"):
        rk.linear(x, packed)


def test_a_gpu_without_a_kernel_is_served_by_triton():
    for device in ("cuda", "rocm"):
        assert _dispatch.describe("linear_codes", device)[0] == "triton"
