"""Routing, sorting by expert and the sum over a token's experts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import (
    DEFINITION,
    FLOATS,
    ROUNDED_ONCE,
    assert_close,
    assert_same_bits,
    distant,
    guarded,
    integers,
    spread,
)

# (tokens, experts, topk): one lane's worth, odd sizes, each kernel's border, the largest.
SHAPES = [
    (0, 8, 2),
    (1, 1, 1),
    (1, 8, 2),
    (5, 7, 7),
    (3, 60, 4),
    (17, 64, 6),
    (9, 128, 8),
    (4, 129, 8),
    (33, 160, 6),
    (2, 256, 32),
    (3, 384, 8),
    (2, 1000, 11),
    (1, 1024, 32),
]
WEIGHTS = (1e-6, 4e-6)


def first_best(row: np.ndarray, count: int) -> list[int]:
    """Indices of the largest, equal ones in order, NaN after every number."""
    return sorted(range(len(row)), key=lambda i: (math.isnan(row[i]), -row[i], i))[:count]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x.double()).exp())


def routed(tokens: int, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((tokens, topk), math.nan), torch.full((tokens, topk), -7, dtype=torch.int32)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_topk_softmax(shape, renormalize, dtype, rng):
    tokens, experts, topk = shape
    x = spread((tokens, experts), dtype, rng, gap=0 if tokens % 2 else 5)
    out = routed(tokens, topk)
    weights, ids = rk.topk_softmax(x, topk, renormalize=renormalize, out=out)
    assert weights is out[0] and ids is out[1]
    expected = torch.tensor(
        [first_best(row, topk) for row in x.double().numpy()], dtype=torch.int32
    )
    assert torch.equal(ids, expected.view(tokens, topk))
    mass = torch.softmax(x.double(), 1).gather(1, ids.long())
    if renormalize:
        mass = mass / mass.sum(1, keepdim=True)
    assert_close("topk_softmax", weights, mass, WEIGHTS)
    reference = rk.reference.topk_softmax(x.double(), topk, renormalize=renormalize)
    assert torch.equal(reference[1], ids)
    assert_close("reference.topk_softmax", reference[0], mass, DEFINITION)
    again = rk.topk_softmax(x, topk, renormalize=renormalize)
    assert_same_bits(again[0], weights)
    assert torch.equal(again[1], ids)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("bias", "renormalize"), [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_topk_sigmoid(shape, bias, renormalize, dtype, rng):
    tokens, experts, topk = shape
    x = spread((tokens, experts), dtype, rng)
    correction = torch.randn(experts, generator=rng) if bias else None
    weights, ids = rk.topk_sigmoid(x, topk, renormalize=renormalize, correction_bias=correction)
    choice = x.double() if correction is None else sigmoid(x) + correction.double()
    check_choice(choice, ids, topk)
    reference, names = rk.reference.topk_sigmoid(
        x.double(), topk, renormalize=renormalize, correction_bias=correction
    )
    for got, chosen, bound in ((weights, ids, WEIGHTS), (reference, names, DEFINITION)):
        expected = sigmoid(x).gather(1, chosen.long())
        if renormalize:
            expected = expected / expected.sum(1, keepdim=True)
        assert_close(
            "topk_sigmoid" if got is weights else "reference.topk_sigmoid", got, expected, bound
        )
    assert (names == ids).all(1).sum() >= tokens - 1  # two scores may tie in float32


def check_choice(choice: torch.Tensor, ids: torch.Tensor, topk: int) -> None:
    """The chosen are the largest, in falling order, but for what float32 cannot tell apart."""
    assert ids.shape == (choice.shape[0], topk)
    for row, chosen in zip(choice, ids.long(), strict=True):
        assert len(set(chosen.tolist())) == topk
        torch.testing.assert_close(
            row[chosen], row.sort(descending=True).values[:topk], rtol=0, atol=1e-6
        )


GATES = [
    (5, 256, 8, 4, 8),
    (1, 8, 8, 3, 3),
    (7, 16, 4, 1, 4),
    (3, 160, 8, 3, 6),
    (2, 256, 1, 1, 8),
    (4, 60, 20, 7, 5),
    (3, 384, 2, 1, 8),
    (1, 1024, 32, 32, 32),
    (0, 64, 4, 2, 6),
    (6, 64, 32, 16, 32),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", GATES, ids=str)
def test_moe_fused_gate(shape, dtype, rng):
    tokens, experts, groups, kept, topk = shape
    x = spread((tokens, experts), dtype, rng, gap=3 if tokens % 2 else 0)
    bias = torch.randn(experts, generator=rng) * 0.3
    weights, ids = rk.moe_fused_gate(x, bias, groups, kept, topk, routed_scaling_factor=2.5)
    choice = sigmoid(x) + bias.double()
    allowed = torch.full_like(choice, -math.inf)
    for t, row in enumerate(choice.unflatten(1, (groups, -1))):
        scores = [float(g.sort(descending=True).values[:2].sum()) for g in row]
        for g in first_best(np.array(scores), kept):
            allowed[t, g * (experts // groups) : (g + 1) * (experts // groups)] = row[g]
    check_choice(allowed, ids, topk)
    reference, names = rk.reference.moe_fused_gate(
        x.double(), bias, groups, kept, topk, routed_scaling_factor=2.5
    )
    for got, chosen, bound in ((weights, ids, WEIGHTS), (reference, names, DEFINITION)):
        expected = sigmoid(x).gather(1, chosen.long())
        expected = expected / (expected.sum(1, keepdim=True) + 1e-20) * 2.5
        assert_close(
            "moe_fused_gate" if got is weights else "reference.moe_fused_gate", got, expected, bound
        )
    assert (names == ids).all(1).sum() >= tokens - 1  # two scores may tie in float32


@pytest.mark.parametrize("experts", [8, 128, 200, 512])
def test_ties_go_to_the_lowest_id(experts):
    x = torch.zeros(3, experts)
    x[1, experts // 2 :] = 1.0
    x[2, ::2] = -0.0
    for op in (rk.topk_softmax, rk.topk_sigmoid):
        ids = op(x, 4)[1]
        assert ids[0].tolist() == [0, 1, 2, 3] == ids[2].tolist()
        assert ids[1].tolist() == [experts // 2 + i for i in range(4)]
    assert rk.moe_fused_gate(x, torch.zeros(experts), 4, 2, 4)[1][0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("experts", [8, 128, 256, 300])
def test_nan_and_infinity_stay_in_their_row(experts, rng):
    x = spread((6, experts), torch.float32, rng)
    bias = torch.zeros(experts)
    ops = [
        lambda x: rk.topk_softmax(x, 3),
        lambda x: rk.topk_softmax(x, 3, renormalize=True),
        lambda x: rk.topk_sigmoid(x, 3, correction_bias=bias),
        lambda x: rk.moe_fused_gate(x, bias, 2, 1, 3),
    ]
    for op in ops:
        clean = op(x)
        y = x.clone()
        y[1, experts - 1] = math.nan
        y[3, :] = math.nan
        y[4, : experts - 1] = -math.inf
        weights, ids = op(y)
        assert torch.isnan(weights[[1, 3]]).all()
        assert not torch.isnan(weights[4]).any() and torch.isfinite(weights[4]).all()
        for row in ids:
            assert len(set(row.tolist())) == 3 and row.min() >= 0 and row.max() < experts
        assert experts - 1 not in ids[1].tolist() and ids[3].tolist() == [0, 1, 2]
        for kept in (0, 2, 5):
            assert_same_bits(weights[kept], clean[0][kept])
            assert torch.equal(ids[kept], clean[1][kept])


def test_rows_do_not_depend_on_the_batch(rng):
    x = spread((37, 128), torch.bfloat16, rng)
    weights, ids = rk.topk_softmax(x, 8)
    for t in (0, 1, 20, 36):
        alone = rk.topk_softmax(x[t : t + 1], 8)
        assert_same_bits(alone[0], weights[t : t + 1])
        assert torch.equal(alone[1], ids[t : t + 1])


def test_offsets_past_two_gigabytes(rng):
    x = distant((2, 64), torch.bfloat16)
    x.copy_(spread((2, 64), torch.bfloat16, rng))
    near = rk.topk_softmax(x.contiguous(), 4)
    far = rk.topk_softmax(x, 4)
    assert_same_bits(far[0], near[0])
    assert torch.equal(far[1], near[1])


def check_aligned(
    ids: torch.Tensor, experts: int, block: int, expert_map: torch.Tensor | None
) -> None:
    sorted_ids, block_experts, total = rk.moe_align_block_size(
        ids, experts, block, expert_map=expert_map
    )
    flat = ids.flatten().tolist()
    expected = []
    owners = []
    for e in range(experts):
        local = e if expert_map is None else int(expert_map[e])
        mine = [i for i, named in enumerate(flat) if named == e]
        if local < 0 or not mine:
            continue
        mine += [len(flat)] * (-len(mine) % block)
        expected += mine
        owners += [local] * (len(mine) // block)
    assert total.tolist() == [len(expected)]
    assert sorted_ids[: len(expected)].tolist() == expected
    assert block_experts[: len(owners)].tolist() == owners
    most = len(flat) + min(len(flat), experts) * (block - 1)
    assert sorted_ids.shape == (most // block * block,) and block_experts.shape == (most // block,)


ALIGN = [
    (0, 2, 4, 16),
    (1, 1, 1, 1),
    (1, 8, 128, 16),
    (33, 3, 5, 1),
    (64, 8, 128, 64),
    (700, 6, 60, 128),
    (5, 2, 1024, 16),
    (4100, 1, 3, 32),
    (257, 8, 256, 7),
]


@pytest.mark.parametrize("shape", ALIGN, ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_moe_align_block_size(shape, mapped, rng):
    tokens, topk, experts, block = shape
    ids = integers(0, experts, (tokens, topk), rng).int()
    expert_map = None
    if mapped:
        expert_map = torch.where(
            torch.rand(experts, generator=rng) < 0.5, -1, torch.arange(experts)
        ).int()
        expert_map = torch.where(expert_map < 0, expert_map, experts - 1 - expert_map).int()
    check_aligned(ids, experts, block, expert_map)


def test_align_leaves_foreign_ids_out(rng):
    check_aligned(integers(-3, 12, (50, 4), rng).int(), 8, 16, None)
    check_aligned(torch.full((9, 2), -1, dtype=torch.int32), 8, 16, None)


def test_align_all_to_one_expert():
    check_aligned(torch.full((1030, 2), 5, dtype=torch.int32), 8, 64, None)


def test_align_reference_agrees(rng):
    ids = integers(-1, 20, (123, 4), rng).int()
    expert_map = torch.tensor([-1, *range(18)], dtype=torch.int32)
    ours = rk.moe_align_block_size(ids, 19, 16, expert_map=expert_map)
    theirs = rk.reference.moe_align_block_size(ids, 19, 16, expert_map=expert_map)
    n = int(ours[2])
    assert torch.equal(ours[2], theirs[2])
    assert torch.equal(ours[0][:n], theirs[0][:n])
    assert torch.equal(ours[1][: n // 16], theirs[1][: n // 16])
    assert [x.shape for x in ours] == [x.shape for x in theirs]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 2, 8), (1, 1, 1), (3, 8, 2048), (5, 6, 257), (2, 0, 16)], ids=str
)
@pytest.mark.parametrize("gap", [0, 3])
def test_moe_sum(shape, dtype, gap, rng):
    x = spread(shape, dtype, rng, gap=gap)
    out = guarded((shape[0], shape[2]), dtype, gap=gap)
    assert rk.moe_sum(x, out=out.view) is out.view
    out.check()
    exact = torch.from_numpy(x.double().numpy().sum(1))
    assert_close("reference.moe_sum", rk.reference.moe_sum(x.double()), exact, DEFINITION)
    assert_close(
        "moe_sum", out.view, exact, (1e-5, 1e-4) if dtype == torch.float32 else ROUNDED_ONCE[dtype]
    )
    assert_same_bits(rk.moe_sum(x), out.view.contiguous())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, b: rk.topk_softmax(x.int(), 2), TypeError, "gating_output"),
        (lambda x, b: rk.topk_softmax(x[0], 2), ValueError, "gating_output"),
        (lambda x, b: rk.topk_softmax(x, 9), ValueError, "topk"),
        (lambda x, b: rk.topk_softmax(x, 0), ValueError, "topk"),
        (lambda x, b: rk.topk_softmax(x, -1), ValueError, "topk"),
        (lambda x, b: rk.topk_softmax(torch.zeros(2, 1025), 2), NotImplementedError, "experts"),
        (lambda x, b: rk.topk_softmax(x.T.contiguous().T, 2), ValueError, "gating_output"),
        (lambda x, b: rk.topk_softmax(x, 2, out=routed(3, 2)), ValueError, "topk_weights"),
        (lambda x, b: rk.topk_softmax(x, 2, routed_scaling_factor=0), ValueError, "scaling"),
        (
            lambda x, b: rk.topk_softmax(x, 2, num_fused_shared_experts=2),
            ValueError,
            "num_fused_shared_experts is 2, expected 0 to 1",
        ),
        (
            lambda x, b: rk.topk_sigmoid(x, 2, num_fused_shared_experts=-1),
            ValueError,
            "num_fused_shared_experts is -1",
        ),
        (lambda x, b: rk.topk_sigmoid(x, 2, correction_bias=b[:7]), ValueError, "correction_bias"),
        (
            lambda x, b: rk.topk_sigmoid(x, 2, correction_bias=b.half()),
            TypeError,
            "correction_bias",
        ),
        (lambda x, b: rk.moe_fused_gate(x, b, 3, 1, 2), ValueError, "num_expert_group"),
        (lambda x, b: rk.moe_fused_gate(x, b, 4, 5, 2), ValueError, "topk_group"),
        (lambda x, b: rk.moe_fused_gate(x, b, 4, 1, 3), ValueError, "stay"),
        (
            lambda x, b: rk.moe_fused_gate(x, b, 4, 2, 2, num_fused_shared_experts=2),
            ValueError,
            "num_fused_shared",
        ),
        (
            lambda x, b: rk.moe_fused_gate(x, b, 4, 2, 2, num_fused_shared_experts=-1),
            ValueError,
            "num_fused_shared",
        ),
        (lambda x, b: rk.moe_align_block_size(x.long(), 4, 4), TypeError, "topk_ids"),
        (lambda x, b: rk.moe_align_block_size(x.int(), 0, 4), ValueError, "num_experts"),
        (lambda x, b: rk.moe_align_block_size(x.int(), 4, 0), ValueError, "block_size"),
        (
            lambda x, b: rk.moe_align_block_size(x.int(), 4, 2, expert_map=b[:3].int()),
            ValueError,
            "expert_map",
        ),
        (lambda x, b: rk.moe_sum(x), ValueError, "input"),
        (lambda x, b: rk.moe_sum(x[None], out=b), ValueError, "out"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.zeros(4, 8), torch.zeros(8))
