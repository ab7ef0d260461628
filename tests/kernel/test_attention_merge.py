"""The merge of two partial attentions by their log-sum-exps."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import (
    FLOATS,
    ROUNDED_ONCE,
    assert_close,
    guarded,
    spread,
)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_merge_state(dtype, rng):
    """Attention over all keys is the merge of attention over two parts of them."""
    n = 9
    heads = 3
    dim = 48
    q = spread((n, heads, dim), dtype, rng)
    k, v = (spread((50, heads, dim), dtype, rng) for _ in range(2))
    cu = torch.tensor([0, n], dtype=torch.int32)
    parts = []
    for keys in (slice(0, 17), slice(17, 50), slice(0, 50)):
        length = torch.tensor([0, keys.stop - keys.start], dtype=torch.int32)
        parts.append(
            rk.reference.flash_attn_varlen(
                q.double(),
                k[keys].double(),
                v[keys].double(),
                cu,
                length,
                causal=False,
                return_softmax_lse=True,
            )
        )
    (a, la), (b, lb), (whole, lse) = parts
    exact, exact_lse = rk.reference.merge_state(a, la, b, lb)
    assert_close("reference.merge_state", exact, whole, (1e-12, 1e-10))
    assert_close("reference.merge_state lse", exact_lse, lse, (1e-12, 1e-10))
    ra = a.to(dtype)
    rb = b.to(dtype)
    expected, _ = rk.reference.merge_state(
        ra.double(), la.float().double(), rb.double(), lb.float().double()
    )
    out = guarded((n, heads, dim), dtype)
    got, got_lse = rk.merge_state(ra, la.float(), rb, lb.float(), out=out.view)
    out.check()
    assert_close("merge_state", got, expected, ROUNDED_ONCE[dtype])
    assert_close("merge_state lse", got_lse, lse, (4e-6, 2e-5))


def test_merge_state_with_an_empty_side(rng):
    a = spread((3, 2, 16), torch.float32, rng)
    la = torch.randn(3, 2, generator=rng)
    nothing = torch.full((3, 2), -math.inf)
    garbage = torch.full((3, 2, 16), math.nan)
    out, lse = rk.merge_state(a, la, garbage, nothing)
    assert torch.equal(out, a) and torch.equal(lse, la)
    out, lse = rk.merge_state(garbage, nothing, a, la)
    assert torch.equal(out, a) and torch.equal(lse, la)
    out, lse = rk.merge_state(garbage, nothing, garbage, nothing)
    assert not out.any() and torch.equal(lse, nothing)


@pytest.mark.parametrize(
    "sides", [(math.nan, -math.inf), (math.nan, 0.5), (math.nan, math.nan)], ids=str
)
@pytest.mark.parametrize("swap", [False, True])
def test_merge_state_of_nan(sides, swap, rng):
    """A side of NaN is not one that saw nothing."""
    la, lb = (torch.full((3, 2), x) for x in (reversed(sides) if swap else sides))
    a, b = (spread((3, 2, 48), torch.float32, rng) for _ in range(2))
    for merge in (rk.merge_state, rk.reference.merge_state):
        out, lse = merge(a, la, b, lb)
        assert out.isnan().all() and lse.isnan().all()
