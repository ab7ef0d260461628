"""A draw from the candidates of shards is the draw from the whole logits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import integers
from tests.kernel.sampling_cases import (
    FILTERS,
    Row,
    columns_of,
    near_tie,
    random_row,
    sample,
    some_edits,
)

pytestmark = pytest.mark.filterwarnings("ignore:radix_kernels runs its reference")


def borders(vocab_size: int, shards: int) -> list[int]:
    """Shards of unequal size that begin at multiples of 4; the last may be empty."""
    step = -(-vocab_size // shards // 4 + 1) * 4
    return [min(i * step, vocab_size // 4 * 4) for i in range(shards)] + [vocab_size]


def shard_of(edits: rk.LogitEdits | None, begin: int, end: int) -> rk.LogitEdits | None:
    if edits is None:
        return None
    assert edits.penalties is not None and edits.bitmask is not None
    counts, *rest = edits.penalties
    bits = edits.bitmask[:, :, None] >> torch.arange(32) & 1
    mine = torch.nn.functional.pad(bits.flatten(1)[:, begin:end], (0, -(end - begin) % 32))
    words = (mine.view(len(mine), -1, 32).long() << torch.arange(32)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return rk.LogitEdits(
        bias=edits.bias,
        penalties=(counts[:, begin:end].contiguous(), *rest),
        min_tokens=edits.min_tokens,
        bitmask=words,
    )


def draw(
    logits: torch.Tensor, rows: list[Row], shards: int, candidates: int, edits=None, order=None
) -> torch.Tensor:
    cuts = borders(logits.shape[1], shards)
    columns = columns_of(rows)
    records = [
        rk.sampling_candidates(
            logits[:, a:b],
            *columns,
            first_id=a,
            vocab_size=logits.shape[1],
            num_candidates=candidates,
            edits=shard_of(edits, a, b),
        )
        for a, b in itertools.pairwise(cuts)
    ]
    together = torch.stack([records[i] for i in order or range(shards)])
    return rk.sample_candidates(together, *columns, vocab_size=logits.shape[1])


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab_size", [9, 67, 1000])
def test_draws_equal_those_of_the_whole(shards, vocab_size, rng):
    rows = [random_row(rng) for _ in range(40)]
    for row in rows[:6]:
        row.temperature = 0.0
    logits = torch.randn(40, vocab_size, generator=rng) * 3
    logits[7] = -math.inf
    logits[8, 5] = math.nan
    logits[9, -1] = math.inf
    logits[10, : vocab_size // 2] = -math.inf
    logits[11] = 1.0
    logits[12, : vocab_size // 2] = -math.inf
    rows[12].temperature = math.inf
    expected = sample(logits, rows)
    got = draw(logits, rows, shards, 2048 // shards, order=list(range(shards))[::-1])
    for i in torch.nonzero(got != expected).flatten().tolist():
        assert near_tie(logits[i], rows[i]), vars(rows[i])
    assert got[[7, 8, 9]].tolist() == [-1, -1, -1]


def test_edits_of_shards(rng):
    rows = [random_row(rng) for _ in range(30)]
    logits = torch.randn(30, 333, generator=rng) * 3
    edits = some_edits(30, 333, rng)
    expected = sample(logits, rows, edits=edits)
    assert torch.equal(draw(logits, rows, 3, 600, edits=edits), expected)


def test_tiny_temperatures_are_greedy():
    logits = torch.tensor([[1.0, 5.0, 2.0, 0.0, 5.0], [-1.0, -9.0, -3.0, -2.0, -1.0]])
    rows = [Row(temperature=1e-40), Row(temperature=1e-42, top_k=2)]
    assert draw(logits, rows, 2, 4).tolist() == [1, 0]


def test_shards_whose_quotients_overflow(rng):
    """At 1e-37 logits below -34 are -inf: a shard of such has none to draw, though its logits look
    larger."""
    logits = torch.full((3, 40), -60.0) - torch.rand(3, 40, generator=rng)
    logits[:, 25] = -20
    rows = [
        Row(temperature=1e-37),
        Row(temperature=1e-37, top_p=0.9),
        Row(temperature=1e-37, min_p=0.1),
    ]
    assert sample(logits, rows).tolist() == [25] * 3
    assert draw(logits, rows, 4, 4).tolist() == [25] * 3


@pytest.mark.parametrize("spread", [1.0, 5.0])
def test_few_candidates_are_enough_or_said_to_be_too_few(spread, rng):
    """-2 only where the filters may keep more than the shards listed, and else the id of the
    whole."""
    vocab_size = 32_000
    candidates = 64
    rows = [Row(seed=i, position=i, **f) for i, f in enumerate(FILTERS)]
    logits = torch.randn(len(rows), vocab_size, generator=rng) * spread
    got = draw(logits, rows, 4, candidates)
    expected = sample(logits, rows)
    for i, row in enumerate(rows):
        if got[i] == -2:
            few = rk.reference.kept_ids(
                logits[i : i + 1], *(c[i : i + 1] for c in columns_of(rows)[1:4])
            ).sum()
            assert row.top_k > candidates or (row.top_k <= 0 and int(few) > candidates), vars(row)
        else:
            assert got[i] == expected[i] or near_tie(logits[i], row), vars(row)
    assert (got[[0, 1, 2, 3]] != -2).all()


def test_errors():
    columns = columns_of([Row(), Row()])
    logits = torch.zeros(2, 8)
    for first_id, vocab_size in ((2, 100), (-4, 100), (96, 100)):
        with pytest.raises(ValueError, match="first_id"):
            rk.sampling_candidates(logits, *columns, first_id=first_id, vocab_size=vocab_size)
    with pytest.raises(ValueError, match="candidates"):
        rk.sampling_candidates(logits, *columns, first_id=0, vocab_size=8, num_candidates=2049)
    records = integers(0, 2, (3, 2, 3 + 700), torch.Generator())
    with pytest.raises(ValueError, match="candidates"):
        rk.sample_candidates(records, *columns, vocab_size=8)
    with pytest.raises(TypeError, match="records"):
        rk.sample_candidates(records.int()[:1], *columns, vocab_size=8)
