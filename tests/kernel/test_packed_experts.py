"""Mixture of experts over packed weights."""

from __future__ import annotations

import itertools

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _loader
from tests.kernel.helpers import FLOATS, assert_close, assert_same_bits, integers
from tests.kernel.packed_experts_cases import TOLERANCE, dequantized, make, oracle

# (tokens, experts, topk, hidden, inter): one token, few pairs, odd sizes, more tokens than a block
# has rows.
SHAPES = [
    (1, 4, 2, 64, 32),
    (7, 8, 2, 128, 64),
    (5, 3, 3, 72, 40),
    (90, 3, 1, 80, 16),
    (0, 2, 1, 64, 32),
]


def oracle_of_codes(x, experts, weights, ids):
    """Where activations too are codes, those between the products of numbers that were rounded to
    x's dtype."""
    group = experts.w1[0].group

    def product(rows, packed):
        codes, scales = rk.reference.quantize_rows(rows.to(x.dtype), group)
        return rk.reference.dequantize_weight(codes, scales, None, group) @ dequantized(packed).T

    out = torch.zeros(x.shape, dtype=torch.float64)
    for column, expert in itertools.product(range(ids.shape[1]), range(len(experts.w1))):
        rows = ids[:, column] == expert
        gate, up = product(x[rows], experts.w1[expert]).chunk(2, -1)
        down = product(torch.nn.functional.silu(gate) * up, experts.w2[expert])
        out[rows] += weights[rows, column, None].double() * down
    return out


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(shape, dtype, rng):
    x, w1, w2, weights, ids = make(*shape, dtype, rng)
    got = rk.fused_experts_packed(x, rk.pack_experts(w1, w2), weights, ids)
    assert got.dtype == dtype
    assert_close("fused_experts_packed", got, oracle(x, w1, w2, weights, ids), TOLERANCE[dtype])


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("kind", "group"),
    [("int8", 0), ("int8", 32), ("fp8", 0), ("fp8", 64), ("int4", 64), ("int4", 32)],
)
def test_quantized(kind, group, rng):
    x, w1, w2, weights, ids = make(9, 4, 2, 128, 64, torch.bfloat16, rng)
    experts = rk.pack_experts(w1, w2, kind, group=group)
    assert experts.nbytes < (w1.numel() + w2.numel()) * 2
    a, b = (torch.stack([dequantized(w) for w in side]) for side in (experts.w1, experts.w2))
    got = rk.fused_experts_packed(x, experts, weights, ids)
    assert_close(
        f"fused_experts_packed {kind}", got, oracle(x, a, b, weights, ids), TOLERANCE[x.dtype]
    )


@pytest.mark.cpu_only
@pytest.mark.parametrize(("kind", "group"), [("w8a8", 0), ("w8a8", 64), ("w4a8", 64), ("w4a8", 32)])
@pytest.mark.parametrize("tokens", [1, 90])
def test_quantized_activations(kind, group, tokens, rng):
    x, w1, w2, weights, ids = make(tokens, 4, 2, 128, 64, torch.bfloat16, rng)
    experts = rk.pack_experts(w1, w2, kind, group=group)
    got = rk.fused_experts_packed(x, experts, weights, ids)
    # A tighter norm than for numbers, so that a product which left its activations as they are
    # fails. One element may be far off: of a code that fell on the other side of a border.
    assert_close(
        f"fused_experts_packed {kind}", got, oracle_of_codes(x, experts, weights, ids), (5e-3, 8e-2)
    )


@pytest.mark.cpu_only
def test_the_library_takes_all_experts_at_once(rng):
    """A decoder points at the library's list of experts, which one that came later would move."""
    if _loader.backend != "cpu":
        pytest.skip("no native CPU library")
    _, w1, w2, _, _ = make(1, 3, 2, 64, 32, torch.float32, rng)
    native = rk.pack_experts(w1, w2).native
    assert native is not None
    assert not hasattr(native, "add")


def test_experts_elsewhere(rng):
    """Ids outside of the experts and experts of other ranks add nothing."""
    x, w1, w2, weights, ids = make(12, 4, 2, 64, 32, torch.float32, rng)
    ids[3, 0] = -1
    ids[4, 1] = 99
    ids[5] = 77
    expert_map = torch.tensor([2, -1, 0, 1, -1], dtype=torch.int32)
    ids[6] = 4
    packed = rk.pack_experts(w1[:3], w2[:3])
    for mapped in (None, expert_map):
        named = ids if mapped is not None else torch.where(ids == 3, 50, ids).to(torch.int32)
        got = rk.fused_experts_packed(x, packed, weights, named, expert_map=mapped)
        clean = torch.where((named < 0) | (named > 4), 1 if mapped is not None else -1, named).to(
            torch.int32
        )
        expected = oracle(x, w1[:3], w2[:3], weights, clean, expert_map=mapped)
        assert_close("fused_experts_packed", got, expected, TOLERANCE[torch.float32])


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", [None, "int8", "fp8", "int4", "w8a8", "w4a8"])
def test_bits_depend_on_neither_the_batch_nor_the_threads(kind, rng):
    x, w1, w2, weights, ids = make(70, 4, 2, 256, 128, torch.bfloat16, rng)
    packed = rk.pack_experts(w1, w2, kind)
    if packed.native is None:
        pytest.skip("torch's product promises nothing about bits")
    whole = rk.fused_experts_packed(x, packed, weights, ids)
    before = rk.get_num_threads()
    try:
        for threads in (1, 2, 5):
            rk.set_num_threads(threads)
            assert_same_bits(rk.fused_experts_packed(x, packed, weights, ids), whole)
            for row in integers(0, 70, (5,), rng).tolist():
                one = slice(row, row + 1)
                assert_same_bits(
                    rk.fused_experts_packed(x[one], packed, weights[one], ids[one]), whole[one]
                )
    finally:
        rk.set_num_threads(before)


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", [None, "fp8", "w8a8", "int4"])
def test_the_call_has_the_bits_of_single_products(kind, rng):
    """Unsorted ids, experts that nobody names, an inner size that the fused product does not take,
    a strided x."""
    x, w1, w2, weights, ids = make(21, 6, 3, 64, 40 if kind is None else 64, torch.bfloat16, rng)
    packed = rk.pack_experts(w1, w2, kind)
    if packed.native is None:
        pytest.skip("the native CPU library is not there")
    ids[ids == 4] = 9
    wide = torch.zeros(21, 96, dtype=x.dtype)
    wide[:, :64] = x
    expected = rk.reference.fused_experts_packed(x, packed, weights, ids)
    assert_same_bits(
        rk.fused_experts_packed(wide[:, :64], packed, weights, ids.t().contiguous().t()), expected
    )


def test_in_place(rng):
    x, w1, w2, weights, ids = make(6, 3, 2, 64, 32, torch.float32, rng)
    packed = rk.pack_experts(w1, w2)
    expected = rk.fused_experts_packed(x, packed, weights, ids)
    assert rk.fused_experts_packed(x, packed, weights, ids, out=x) is x
    assert_same_bits(x, expected)


@pytest.mark.parametrize(
    ("index", "change", "error"),
    [
        (0, lambda x: x[0], ValueError),
        (2, lambda x: x.double(), TypeError),
        (2, lambda x: x[:1], ValueError),
        (3, lambda x: x.long(), TypeError),
        (3, lambda x: x[:, :1], ValueError),
    ],
)
def test_errors(index, change, error, rng):
    x, w1, w2, weights, ids = make(6, 3, 2, 64, 32, torch.float32, rng)
    args = [x, rk.pack_experts(w1, w2), weights, ids]
    args[index] = change(args[index])
    with pytest.raises(error):
        rk.fused_experts_packed(*args)
    with pytest.raises(ValueError):
        rk.pack_experts(w1[:2], w2)
