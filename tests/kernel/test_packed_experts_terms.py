"""Biases and activations of experts over packed weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import radix_kernels as rk
from tests.kernel.code_weights import FLOAT4
from tests.kernel.experts_cases import ACTIVATIONS, activated
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits, guarded, integers, spread
from tests.kernel.packed_experts_cases import TOLERANCE, dequantized, make, oracle

# (tokens, experts, topk, hidden, inter): one token, few pairs, widths that are no whole blocks of
# outputs, more tokens than a block has rows, none.
SHAPES = [
    (1, 4, 4, 64, 32),
    (7, 8, 2, 72, 64),
    (5, 3, 3, 72, 40),
    (90, 3, 1, 80, 17),
    (0, 2, 1, 64, 32),
]


def biases(
    experts: int, hidden: int, inter: int, dtype: torch.dtype, rng: torch.Generator
) -> dict[str, Any]:
    return {
        "bias1": torch.randn(experts, 2 * inter, generator=rng).to(dtype),
        "bias2": torch.randn(experts, hidden, generator=rng).to(dtype),
    }


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(shape, dtype, activation, rng):
    x, w1, w2, weights, ids = make(*shape, dtype, rng)
    terms = biases(shape[1], shape[3], shape[4], dtype, rng)
    ids[ids == 1] = 77  # an expert without pairs, whose bias adds nothing
    out = guarded(tuple(x.shape), dtype, gap=8)
    packed = rk.pack_experts(w1, w2)
    rk.fused_experts_packed(x, packed, weights, ids, activation=activation, out=out.view, **terms)
    out.check()
    wide = {name: bias.double() for name, bias in terms.items()}
    expected = oracle(x, w1, w2, weights, ids, activation=activation, **wide)
    # A width that is no whole blocks rounds gate and up too.
    assert_close(f"fused_experts_packed {activation}", out.view, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["bias1", "bias2"])
def test_one_bias_of_either_type(name, rng):
    """A bias is read as it is or widened: the bits are the same."""
    for inter in (32, 40):
        x, w1, w2, weights, ids = make(20, 4, 2, 64, inter, torch.bfloat16, rng)
        packed = rk.pack_experts(w1, w2)
        bias = biases(4, 64, inter, torch.bfloat16, rng)[name]
        got = rk.fused_experts_packed(x, packed, weights, ids, **{name: bias})
        wide = rk.fused_experts_packed(x, packed, weights, ids, **{name: bias.float()})
        assert_same_bits(got, wide)
        expected = oracle(x, w1, w2, weights, ids, **{name: bias.double()})
        assert_close("fused_experts_packed", got, expected, TOLERANCE[x.dtype])


def mxfp4_experts(experts: int, rows: int, columns: int, rng) -> tuple[rk.PackedWeight, ...]:
    def one() -> rk.PackedWeight:
        codes = integers(0, 256, (rows, columns // 2), rng).to(torch.uint8)
        powers = integers(120, 123, (rows, columns // 32), rng).to(torch.uint8)
        return rk.pack_weight(codes, powers, "mxfp4", group=32, dtype=torch.bfloat16)

    return tuple(one() for _ in range(experts))


def numbers_of(packed: rk.PackedWeight) -> torch.Tensor:
    """What the codes of a weight stand for, float64."""
    if packed.kind != "mxfp4":
        return dequantized(packed)
    codes, powers, _ = rk.unpack_weight(packed)
    halves = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    return FLOAT4[halves] * torch.exp2(powers.double() - 127).repeat_interleave(32, 1)


def oracle_of_codes(x, experts, weights, ids, activation, terms):
    """In float64; x and what is between the products in 8 bits where the kind has it so."""
    kind = experts.w1[0].kind

    def product(rows, packed, bias):
        if kind in ("w8a8", "w4a8", "mxfp4"):
            codes, scales = rk.reference.quantize_rows(rows.to(x.dtype), packed.group)
            rows = rk.reference.dequantize_weight(codes, scales, None, packed.group)
        return rows.double() @ numbers_of(packed).T + bias.double()

    out = torch.zeros(x.shape, dtype=torch.float64)
    for column, expert in itertools.product(range(ids.shape[1]), range(len(experts.w1))):
        rows = ids[:, column] == expert
        both = product(x[rows], experts.w1[expert], terms["bias1"][expert])
        act = activated(activation, *both.chunk(2, -1))
        down = product(act, experts.w2[expert], terms["bias2"][expert])
        out[rows] += weights[rows, column, None].double() * down
    return out


KINDS = [
    ("fp8", 0), ("int8", 0), ("int8", 32), ("int4", 64), ("w8a8", 0), ("w8a8", 64), ("w4a8", 32),
    ("mxfp4", 32),
]  # fmt: skip


@pytest.mark.cpu_only
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_clamped"])
@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("tokens", [1, 50])
def test_kinds(kind, group, tokens, activation, rng):
    x, w1, w2, weights, ids = make(tokens, 4, 2, 128, 64, torch.bfloat16, rng)
    if kind == "mxfp4":
        x = x / 8
        experts = rk.PackedExperts(
            w1=mxfp4_experts(4, 128, 128, rng), w2=mxfp4_experts(4, 128, 64, rng)
        )
    else:
        experts = rk.pack_experts(w1, w2, kind, group=group)
    terms = biases(4, 128, 64, torch.float32, rng)
    got = rk.fused_experts_packed(x, experts, weights, ids, activation=activation, **terms)
    expected = oracle_of_codes(x, experts, weights, ids, activation, terms)
    # One element may be far off: of a code of x that fell on the other side of a border.
    assert_close(f"fused_experts_packed {kind} {activation}", got, expected, (5e-3, 8e-2))


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("kind", "inter"), [(None, 128), (None, 72), ("int8", 128), ("w8a8", 128), ("w4a8", 128)]
)
def test_bits_depend_on_neither_the_batch_nor_the_threads(kind, inter, rng):
    x, w1, w2, weights, ids = make(70, 4, 2, 256, inter, torch.bfloat16, rng)
    packed = rk.pack_experts(w1, w2, kind)
    if packed.native is None:
        pytest.skip("torch's product promises nothing about bits")
    options = biases(4, 256, inter, torch.bfloat16, rng)
    options["activation"] = "swiglu_clamped"
    whole = rk.fused_experts_packed(x, packed, weights, ids, **options)
    before = rk.get_num_threads()
    try:
        for threads in (1, 3):
            rk.set_num_threads(threads)
            assert_same_bits(rk.fused_experts_packed(x, packed, weights, ids, **options), whole)
            for row in integers(0, 70, (5,), rng).tolist():
                one = slice(row, row + 1)
                assert_same_bits(
                    rk.fused_experts_packed(x[one], packed, weights[one], ids[one], **options),
                    whole[one],
                )
    finally:
        rk.set_num_threads(before)


@pytest.mark.parametrize("inter", [32, 24])
def test_the_clamp_keeps_nan_and_bounds_infinity(inter, rng):
    x, w1, w2, weights, ids = make(6, 2, 2, 64, inter, torch.float32, rng)
    packed = rk.pack_experts(w1, w2)
    options = biases(2, 64, inter, torch.float32, rng)
    options["activation"] = "swiglu_clamped"
    options["bias1"][:, 0] = float("inf")  # a gate that becomes 7
    options["bias1"][:, inter + 1] = -float("inf")  # an up that becomes -7
    got = rk.fused_experts_packed(x, packed, weights, ids, **options)
    assert_close(
        "fused_experts_packed", got, oracle(x, w1, w2, weights, ids, **options), (2e-6, 2e-5)
    )
    options["bias1"][1, inter - 1] = float("nan")
    assert rk.fused_experts_packed(x, packed, weights, ids, **options).isnan().all()


def test_experts_elsewhere(rng):
    x, w1, w2, weights, ids = make(12, 4, 2, 64, 32, torch.float32, rng)
    terms = biases(3, 64, 32, torch.float32, rng)
    expert_map = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    ids[5] = 1  # another rank's twice: nothing is added, no bias either
    packed = rk.pack_experts(w1[:3], w2[:3])
    got = rk.fused_experts_packed(x, packed, weights, ids, expert_map=expert_map, **terms)
    expected = oracle(x, w1[:3], w2[:3], weights, ids, expert_map=expert_map, **terms)
    assert_close("fused_experts_packed", got, expected, TOLERANCE[torch.float32])
    assert (got[5] == 0).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bias1": torch.zeros(3, 32)}, ValueError, r"bias1 has shape \[3, 32\]"),
        ({"bias2": torch.zeros(2, 64)}, ValueError, r"bias2 has shape \[2, 64\]"),
        ({"bias2": torch.zeros(64, 3).T}, ValueError, "bias2 is not contiguous"),
        ({"bias1": torch.zeros(3, 64).half()}, TypeError, "bias1 has dtype float16"),
        ({"activation": "relu"}, ValueError, "activation is 'relu', expected one of silu, gelu"),
    ],
)
def test_errors(options, error, message, rng):
    x, w1, w2, weights, ids = make(6, 3, 2, 64, 32, torch.float32, rng)
    with pytest.raises(error, match=message):
        rk.fused_experts_packed(x, rk.pack_experts(w1, w2), weights, ids, **options)


@pytest.mark.cpu_only
def test_errors_of_the_library(rng):
    """What a caller of the C ABI is told."""
    x, w1, w2, weights, ids = make(6, 3, 2, 64, 32, torch.float32, rng)
    native = rk.pack_experts(w1, w2).native
    if native is None:
        pytest.skip("the native CPU library is not there")
    workspace = torch.empty(native.workspace_size(x, ids), dtype=torch.uint8)
    out = torch.empty_like(x)
    for gating, message in (
        ((4, 0.0, 0.0), "activation is 4"),
        ((0, 1.0, 0.0), "expected 0 for activation 0"),
        ((3, float("inf"), 7.0), "alpha is inf"),
        ((3, 1.0, 0.0), "limit is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            native.run(x, weights, ids, None, None, gating, None, out, workspace)
    with pytest.raises(ValueError, match="bias1 has shape"):
        native.run(x, weights, ids, spread((3, 63), x.dtype, rng), None, (0, 0.0, 0.0), None, out,
                   workspace)  # fmt: skip
