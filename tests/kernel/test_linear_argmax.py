"""The greedy draw from a product whose logits are never written."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import radix_kernels as rk
from radix_kernels import _loader
from tests.kernel.helpers import FLOATS, assert_same_bits, integers, spread

# (kind, group): every product that leaves maxima, dense and quantized, on vectors and on tiles.
KINDS = [
    (None, None),
    ("int8", 0),
    ("int8", 32),
    ("fp8", 0),
    ("fp8", 64),
    ("w8a8", 0),
    ("w8a8", 64),
    ("int4", 64),
    ("w4a8", 32),
]
ROWS = [0, 1, 2, 5, 8, 9, 33, 70]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """What the sampler draws at temperature 0."""
    rows = logits.shape[0]
    zeros = torch.zeros(rows)
    ones = torch.ones(rows)
    return rk.top_k_top_p_sampling(
        logits, zeros, zeros.int() - 1, ones, zeros, zeros.to(torch.int64), zeros.to(torch.int64)
    )


def assert_greedy(x: torch.Tensor, weight: rk.PackedWeight | torch.Tensor) -> torch.Tensor:
    """Compares ids and maxima with the logits of `linear`; returns the ids."""
    logits = rk.linear(x, weight, out_dtype=torch.float32)
    ids, maxima = rk.linear_argmax(x, weight)
    assert (ids.dtype, maxima.dtype, ids.shape, maxima.shape) == (
        torch.int32,
        torch.float32,
        x.shape[:1],
        x.shape[:1],
    )
    assert torch.equal(ids.cpu(), greedy(logits.cpu()))
    drawn = ids >= 0
    assert_same_bits(maxima[drawn], logits[drawn].gather(1, ids[drawn, None].long()).squeeze(1))
    assert maxima[~drawn].isnan().all()
    return ids


def packed(w: torch.Tensor, kind: str | None, group: int | None) -> rk.PackedWeight:
    if kind and _loader.backend != "cpu":
        pytest.skip("quantized weights belong to the CPU library")
    return rk.pack_weight(w, kind=kind, group=group)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 34), (17, 64), (48, 7), (1000, 130)])
def test_equals_linear_and_the_greedy_draw(dtype, kind, group, n, k, rng):
    w = spread((n, k), dtype, rng)
    weight = packed(w, kind, group)
    for rows in ROWS:
        x = spread((rows, k), dtype, rng, gap=5)
        assert_greedy(x, weight)
        if kind is None:
            assert_greedy(x, w)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reference(dtype, rng):
    """Small integers: sums are exact, so that the definition gives the same ids whatever its order
    of additions."""
    x, w = (integers(-4, 5, shape, rng).to(dtype) for shape in ((33, 40), (90, 40)))
    ids, maxima = rk.linear_argmax(x, rk.pack_weight(w))
    wanted = (x.double().numpy() @ w.double().numpy().T).astype(np.float32)
    assert ids.tolist() == wanted.argmax(1).tolist()  # numpy takes the first of equals
    assert maxima.tolist() == wanted.max(1).tolist()
    for result, given in zip(rk.reference.linear_argmax(x, w), (ids, maxima), strict=True):
        assert_same_bits(result, given)


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_ties_go_to_the_lowest_id(kind, group, rows, rng):
    """Every row of the weight is there three times, in other lanes and in other threads' parts."""
    distinct = spread((700, 64), torch.bfloat16, rng)
    weight = packed(torch.cat([distinct] * 3), kind, group)
    x = spread((rows, 64), torch.bfloat16, rng)
    assert (assert_greedy(x, weight) < 700).all()
    # All equal, zeros of both signs among them.
    signs = torch.where(torch.arange(2100) % 3 == 0, -1.0, 1.0)[:, None] * torch.ones(2100, 64)
    flat = packed((signs * 0).to(torch.bfloat16), None, None)
    assert assert_greedy(x, flat).tolist() == [0] * rows


@pytest.mark.parametrize("n", [90, 96])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_without_a_draw(dtype, n, rng):
    """-1 for NaN, +inf and nothing but -inf, of their rows only; zeros that pad the last block are
    no choice."""
    x = torch.ones((4, 33), dtype=dtype)
    x[2, 20] = math.nan
    negative = -spread((n, 33), dtype, rng).abs() - 1
    assert (assert_greedy(x, rk.pack_weight(negative)) == -1).tolist() == [
        False,
        False,
        True,
        False,
    ]
    logits = torch.full((n, 1), -math.inf, dtype=dtype)
    one = torch.ones((3, 1), dtype=dtype)
    assert assert_greedy(one, rk.pack_weight(logits)).tolist() == [-1] * 3
    logits[n - 1] = -7
    assert assert_greedy(one, rk.pack_weight(logits)).tolist() == [n - 1] * 3
    for bad in (math.inf, math.nan):
        logits[n - 2] = bad
        assert assert_greedy(one, rk.pack_weight(logits)).tolist() == [-1] * 3


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_rows_and_threads_change_nothing(kind, group, rng):
    x = spread((70, 200), torch.bfloat16, rng)
    w = spread((3000, 200), torch.bfloat16, rng)
    weight = packed(w, kind, group)
    ids, maxima = rk.linear_argmax(x, weight)
    before = rk.get_num_threads()
    try:
        for threads in (1, 2, 5):
            rk.set_num_threads(threads)
            for begin, end in ((0, 70), (0, 1), (3, 5), (10, 26), (37, 70)):
                part = rk.linear_argmax(x[begin:end], weight)
                assert_same_bits(part[0], ids[begin:end])
                assert_same_bits(part[1], maxima[begin:end])
    finally:
        rk.set_num_threads(before)


def test_more_rows_than_a_task_takes(rng):
    x = spread((700, 2500), torch.bfloat16, rng)
    w = spread((96, 2500), torch.bfloat16, rng)
    assert_greedy(x, rk.pack_weight(w))


def test_errors():
    x = torch.zeros((2, 8))
    w = torch.zeros((16, 8))
    weight = rk.pack_weight(w)
    with pytest.raises(ValueError, match=r"linear_argmax: x has 3 dimensions, expected 2"):
        rk.linear_argmax(x[None], weight)
    with pytest.raises(ValueError, match=r"x has last dimension 7, expected 8"):
        rk.linear_argmax(x[:, :7], weight)
    with pytest.raises(TypeError, match=r"x has dtype torch.bfloat16, expected float32"):
        rk.linear_argmax(x.to(torch.bfloat16), weight)


@pytest.mark.cpu_only
def test_numpy_arrays(rng):
    x, w = (spread(shape, torch.float32, rng).numpy() for shape in ((3, 8), (40, 8)))
    for weight in (rk.pack_weight(w), w):
        ids, maxima = rk.linear_argmax(x, weight)
        assert isinstance(ids, np.ndarray) and ids.tolist() == (x @ w.T).argmax(1).tolist()
        assert np.allclose(maxima, (x @ w.T).max(1))
