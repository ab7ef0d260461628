"""Many draws of one row follow the softmax, and what filters leave of it."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import integers
from tests.kernel.sampling_cases import (
    FILTERS,
    Row,
    kept_python,
    near_tie,
    sample,
)


def test_seed_position_and_stream_change_the_draw(rng):
    """Ten draws from 1,000 ids: two ways agree on all ten once in 10**30 runs."""
    logits = torch.zeros(10, 1000)
    seed = int(integers(0, 2**60, (), rng))
    ways = {"seed": seed, "low": seed ^ 1, "high": seed ^ (1 << 62)}
    draws = {
        name: sample(logits, [Row(seed=s, position=100 * i) for i in range(10)])
        for name, s in ways.items()
    }
    draws["position"] = sample(logits, [Row(seed=seed, position=100 * i + 1) for i in range(10)])
    draws["stream"] = sample(
        logits, [Row(seed=seed, position=100 * i) for i in range(10)], stream=1
    )
    assert len({tuple(ids.tolist()) for ids in draws.values()}) == len(draws)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution_chi_square(temperature, rng):
    """20,000 draws of one row follow the softmax."""
    draws = 20_000
    vocab_size = 11
    logits = torch.randn(vocab_size, generator=rng)
    first = int(integers(0, 2**40, (), rng))
    half = draws // 2
    # Half the draws vary the seed, half the position.
    rows = [Row(temperature=temperature, seed=first + i) for i in range(half)]
    rows += [Row(temperature=temperature, seed=first, position=i + 1) for i in range(half)]
    ids = sample(logits.expand(draws, -1).contiguous(), rows)
    counts = torch.bincount(ids.long(), minlength=vocab_size).double()
    expected = torch.softmax(logits.double() / temperature, -1) * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 46  # 10 degrees of freedom: exceeded once in 700,000 runs


def test_filtered_distribution(rng):
    """Top-k 3 of a known row: only those three, in their renormalised shares."""
    logits = torch.tensor([0.1, 2.0, 1.0, -1.0, 1.5, 0.0])
    first = int(integers(0, 2**40, (), rng))
    rows = [Row(top_k=3, seed=first + i) for i in range(8000)]
    ids = sample(logits.expand(8000, -1).contiguous(), rows).long()
    assert set(ids.unique().tolist()) == {1, 2, 4}
    counts = torch.bincount(ids, minlength=6)[[1, 2, 4]].double()
    expected = torch.softmax(logits[[1, 2, 4]].double(), -1) * 8000
    assert float(((counts - expected) ** 2 / expected).sum()) < 28  # 2 degrees: once in 10**6


def test_infinite_temperature_draws_evenly_from_what_is_allowed(rng):
    allowed = torch.tensor([2, 17, 300, 20_001])
    logits = torch.full((1300, 20_003), -math.inf)
    logits[:, allowed] = torch.randn(1300, 4, generator=rng) * 5
    first = int(integers(0, 2**40, (), rng))
    rows = [Row(temperature=math.inf, seed=first + i) for i in range(1300)]
    ids = sample(logits, rows)
    counts = torch.stack([(ids == i).sum() for i in allowed])
    assert int(counts.sum()) == 1300
    # Chi-square, 3 degrees of freedom: once in 350,000 runs.
    assert float((counts - 325).square().sum()) / 325 < 28.5
    few = [Row(temperature=math.inf, seed=first + i, **f) for i, f in enumerate(FILTERS)]
    ids = sample(logits[: len(few)], few)
    assert torch.isin(ids, allowed).all()
    for i, row in enumerate(few):  # ids are in the order of their logits still, but all of one mass
        row.temperature = 3e38
        assert int(sample(logits[i : i + 1], [row])) == int(ids[i]) or near_tie(logits[i], row)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9}]
)
def test_distribution_of_each_filter(filters, request, rng):
    """A million draws (fewer on the CPU) of one row follow the renormalised softmax of what the
    filters keep."""
    draws = 20_000 if request.config.getoption("--device") == "cpu" else 1_000_000
    logits = torch.randn(64, generator=rng) * 1.5
    first = int(integers(0, 2**40, (), rng))
    column = torch.ones(draws)
    given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    ids = rk.top_k_top_p_sampling(
        logits.expand(draws, -1),
        column,
        (column * given["top_k"]).int(),
        column * given["top_p"],
        column * given["min_p"],
        torch.arange(draws) + first,
        torch.arange(draws) % 7,
    )
    kept = torch.tensor(kept_python(logits.numpy(), Row(**filters)))
    counts = torch.bincount(ids.long(), minlength=64)
    assert int(counts[kept].sum()) == draws
    expected = torch.softmax(logits[kept].double(), -1) * draws
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = len(kept) - 1
    # Wilson-Hilferty: six deviations.
    bound = (
        freedom * (1 - 2 / (9 * freedom) + 6 * math.sqrt(2 / (9 * freedom))) ** 3
        if freedom
        else 1e-6
    )
    assert chi_square < bound
