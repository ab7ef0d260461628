"""`topk_softmax` within groups of experts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import DEFINITION, FLOATS, assert_close, spread
from tests.kernel.test_moe import GATES, WEIGHTS, first_best, routed


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", GATES, ids=str)
def test_topk_softmax_of_groups(shape, dtype, renormalize, rng):
    tokens, experts, groups, kept, topk = shape
    x = spread((tokens, experts), dtype, rng, gap=3 if tokens % 2 else 0)
    options = {"renormalize": renormalize, "num_expert_group": groups, "topk_group": kept}
    weights, ids = rk.topk_softmax(x, topk, out=routed(tokens, topk), **options)
    size = experts // groups
    expected = torch.empty(tokens, topk, dtype=torch.int32)
    for t, row in enumerate(x.double().numpy()):
        stay = first_best(row.reshape(groups, size).max(1), kept)
        allowed = np.full_like(row, -math.inf)
        for g in stay:
            allowed[g * size : (g + 1) * size] = row[g * size : (g + 1) * size]
        expected[t] = torch.tensor(first_best(allowed, topk))
    assert torch.equal(ids, expected)
    mass = torch.softmax(x.double(), 1).gather(1, ids.long())
    if renormalize:
        mass = mass / mass.sum(1, keepdim=True)
    assert_close("topk_softmax", weights, mass, WEIGHTS)
    reference = rk.reference.topk_softmax(x.double(), topk, **options)
    assert torch.equal(reference[1], ids)
    assert_close("reference.topk_softmax", reference[0], mass, DEFINITION)


def test_groups_with_nan_and_ties(rng):
    """A NaN counts least in its group; of equal groups the first stays."""
    x = torch.zeros(2, 12)
    x[0, :6] = math.nan
    x[1, 4] = 1.0
    options = {"num_expert_group": 4, "topk_group": 2}
    weights, ids = rk.topk_softmax(x, 3, **options)
    assert ids.tolist() == [[6, 7, 8], [4, 0, 1]]
    assert weights[0].isnan().all() and weights[1].isfinite().all()
    assert torch.equal(rk.reference.topk_softmax(x, 3, **options)[1], ids)


@pytest.mark.parametrize(
    ("groups", "kept", "message"),
    [
        (5, 1, r"gating_output has 12 experts in num_expert_group = 5 groups"),
        (4, 0, "topk_group is 0, expected 1 to 4"),
        (4, 5, "topk_group is 5, expected 1 to 4"),
        (4, 1, "but the 1 groups that stay have 3 experts"),
    ],
)
def test_errors_of_groups_of_a_softmax(groups, kept, message):
    with pytest.raises(ValueError, match=message):
        rk.topk_softmax(torch.zeros(2, 12), 4, num_expert_group=groups, topk_group=kept)
