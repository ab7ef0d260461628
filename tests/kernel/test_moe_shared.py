"""Experts that every token goes to, behind those that the routers choose."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import assert_close, assert_same_bits, spread
from tests.kernel.test_moe import WEIGHTS


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("op", ["topk_softmax", "topk_sigmoid"])
@pytest.mark.parametrize("shape", [(5, 64, 6), (1, 8, 3), (4, 60, 5), (3, 160, 29)], ids=str)
def test_shared_experts_of_ungrouped_routers(shape, op, shared, rng):
    """And weights that are scaled, which theirs are not."""
    tokens, experts, topk = shape
    x = spread((tokens, experts), torch.float32, rng)
    x[0, 2] = math.nan
    route, define = getattr(rk, op), getattr(rk.reference, op)
    scaling = 2.5 if op == "topk_softmax" else 1.0
    options = {"routed_scaling_factor": scaling} if op == "topk_softmax" else {}
    plain = route(x, topk)
    weights, ids = route(x, topk + shared, num_fused_shared_experts=shared, **options)
    assert torch.equal(ids[:, :topk], plain[1])
    assert_close(op, weights[1:, :topk], plain[0][1:].double() * scaling, WEIGHTS)
    numbers = torch.arange(experts, experts + shared).int()
    assert torch.equal(ids[:, topk:], numbers.expand(tokens, -1))
    assert torch.isnan(weights[0]).all() and (weights[1:, topk:] == 1).all()
    expected = define(x.double(), topk + shared, num_fused_shared_experts=shared, **options)
    assert_close(op, weights, expected[0], WEIGHTS)
    assert torch.equal(ids, expected[1])


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize(
    "shape", [(5, 256, 8, 4, 8), (1, 8, 8, 3, 3), (4, 60, 20, 7, 5), (6, 64, 32, 16, 29)], ids=str
)
def test_shared_experts_stand_behind_the_routed(shape, shared, rng):
    tokens, experts, groups, kept, topk = shape
    x = spread((tokens, experts), torch.float32, rng)
    bias = torch.randn(experts, generator=rng)
    x[0, 2] = math.nan
    plain = rk.moe_fused_gate(x, bias, groups, kept, topk, routed_scaling_factor=2.5)
    options = {"num_fused_shared_experts": shared, "routed_scaling_factor": 2.5}
    weights, ids = rk.moe_fused_gate(x, bias, groups, kept, topk + shared, **options)
    assert_same_bits(weights[:, :topk], plain[0])
    assert torch.equal(ids[:, :topk], plain[1])
    assert torch.equal(
        ids[:, topk:], torch.arange(experts, experts + shared).int().expand(tokens, -1)
    )
    assert torch.isnan(weights[0]).all() and (weights[1:, topk:] == 1).all()
    reference = rk.reference.moe_fused_gate(
        x.double(), bias, groups, kept, topk + shared, **options
    )
    assert_close("moe_fused_gate", weights, reference[0], WEIGHTS)
    assert torch.equal(ids, reference[1])
