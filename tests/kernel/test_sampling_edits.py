"""Penalties, counts, and the edits that a draw applies on its way."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import assert_close, assert_same_bits, guarded, integers
from tests.kernel.sampling_cases import (
    IN_PROMPT,
    Row,
    edited_python,
    random_row,
    sample,
    some_edits,
)


def test_penalties(rng):
    batch = 6
    vocab_size = 90
    slots_total = 9
    counts = integers(0, 3, (slots_total, vocab_size), rng).to(torch.int32)
    counts[integers(0, 2, counts.shape, rng).bool()] |= IN_PROMPT
    slots = torch.tensor([3, -1, 0, 8, 3, -1], dtype=torch.int32)
    rep = torch.rand(batch, generator=rng) + 0.6
    freq, pres = (torch.randn(batch, generator=rng) for _ in range(2))
    holder = guarded((batch, vocab_size), torch.float32, gap=7)
    holder.view.copy_(torch.randn(batch, vocab_size, generator=rng) * 4)
    before = holder.view.clone()
    expected = before.double()
    for b, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for t in range(vocab_size):
            word = int(counts[slot, t])
            x = float(before[b, t])
            n = word & (IN_PROMPT - 1)
            if word:
                x = x / float(rep[b]) if x > 0 else x * float(rep[b])
            if n:
                x -= float(freq[b]) * n + float(pres[b])
            expected[b, t] = x
    unchanged = counts.clone()
    rk.apply_penalties_inplace(holder.view, counts, slots, rep, freq, pres)
    holder.check()
    assert torch.equal(counts, unchanged)
    assert_close("apply_penalties_inplace", holder.view, expected, (1e-6, 4e-6))
    assert_same_bits(holder.view[[1, 5]], before[[1, 5]])


def test_neutral_penalties_and_masked_logits_keep_their_bits(rng):
    logits = torch.randn(2, 40, generator=rng)
    logits[:, 3] = -math.inf
    counts = torch.full((2, 40), IN_PROMPT + 5, dtype=torch.int32)
    before = logits.clone()
    ones = torch.ones(2)
    zeros = torch.zeros(2)
    rk.apply_penalties_inplace(
        logits, counts, torch.tensor([0, 1], dtype=torch.int32), ones, zeros, zeros
    )
    assert_same_bits(logits, before)


def test_count_tokens(rng):
    counts = torch.zeros(4, 10, dtype=torch.int32)
    counts[1, 2] = IN_PROMPT
    slots = torch.tensor([1, 1, -1, 3, 0], dtype=torch.int32)
    ids = torch.tensor([2, 2, 5, 9, -1], dtype=torch.int32)
    rk.count_tokens_inplace(counts, slots, ids)
    expected = torch.zeros(4, 10, dtype=torch.int32)
    expected[1, 2] = IN_PROMPT + 2
    expected[3, 9] = 1
    assert torch.equal(counts, expected)
    rk.count_tokens_inplace(counts, slots[:0], ids[:0])
    assert torch.equal(counts, expected)


def only(edits: rk.LogitEdits, name: str) -> rk.LogitEdits:
    return rk.LogitEdits(**{name: getattr(edits, name)})


@pytest.mark.parametrize("vocab_size", [1, 2, 67, 256, 1000])
def test_reference_edits_equal_the_definition(vocab_size, rng):
    rows = [random_row(rng) for _ in range(6)]
    logits = torch.randn(6, vocab_size, generator=rng) * 3
    edits = some_edits(6, vocab_size, rng)
    position = torch.tensor([row.position for row in rows])
    for case in (
        edits,
        *(only(edits, name) for name in ("bias", "penalties", "min_tokens", "bitmask")),
    ):
        got = rk.reference.edited_logits(logits, position, case, compute_dtype=torch.float32)
        assert_same_bits(got + 0.0, edited_python(logits, rows, case) + 0.0)


@pytest.mark.parametrize("vocab_size", [1, 2, 67, 1000, 5_003])
def test_edits_on_the_way_equal_edited_logits(vocab_size, rng):
    """The same ids as from logits that were edited before, and the tensor stays as it was."""
    rows = [random_row(rng) for _ in range(24)]
    for row in rows[:8]:
        row.temperature = 0.0
    holder = guarded((24, vocab_size), torch.float32, gap=3)
    holder.view.copy_(torch.randn(24, vocab_size, generator=rng) * 3)
    edits = some_edits(24, vocab_size, rng)
    for case in (
        edits,
        *(only(edits, name) for name in ("bias", "penalties", "min_tokens", "bitmask")),
    ):
        expected = sample(edited_python(holder.view, rows, case), rows)
        assert torch.equal(sample(holder.view, rows, edits=case), expected)
    holder.check()


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 65, 700, 16384, 40_001])
def test_a_greedy_row_under_a_mask_is_the_first_of_its_largest(vocab_size, share, rng):
    """Many values are equal; what the mask does not allow is larger, or no number."""
    rows = 3
    allowed = torch.rand(rows, vocab_size, generator=rng) < share
    allowed[1] = False
    allowed[1, vocab_size // 2] = True
    logits = integers(-3, 3, (rows, vocab_size), rng).float()
    logits[2, allowed[2]] = -math.inf if vocab_size == 65 else -2.0
    seen = logits.masked_fill(~allowed, -math.inf)
    logits[~allowed] = torch.tensor([9.0, math.inf, math.nan])[: 1 + vocab_size % 3].max()
    words = torch.nn.functional.pad(allowed, (0, -vocab_size % 32)).view(rows, -1, 32).int()
    bitmask = (words << torch.arange(32, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    zero, one = torch.zeros(rows), torch.ones(rows)
    top_k, seeds = torch.zeros(rows, dtype=torch.int32), torch.arange(rows)
    ids = rk.top_k_top_p_sampling(
        logits, zero, top_k, one, zero, seeds, seeds, edits=rk.LogitEdits(bitmask=bitmask)
    )
    for row in range(rows):
        is_finite = bool(seen[row].isfinite().any())
        expected = int((seen[row] == seen[row].max()).nonzero()[0]) if is_finite else -1
        assert int(ids[row]) == expected


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf, 3e38])
def test_a_bias_behind_the_vocabulary_is_skipped(value, rng):
    """The ids that fill up the last group of 128, and those of groups that are not there."""
    logits = torch.randn(3, 200, generator=rng)
    rows = [Row(temperature=0.0), Row(seed=4), Row(seed=5, top_p=0.8)]
    ids = torch.tensor([[200, 255, 256, 2**31 - 1]] * 3, dtype=torch.int32)
    edits = rk.LogitEdits(bias=(ids, torch.full((3, 4), value)))
    assert torch.equal(sample(logits, rows, edits=edits), sample(logits, rows))


def test_errors_of_edits():
    logits = torch.zeros(2, 40)
    row = torch.ones(2)
    good = [row, row.int(), row, row, row.long(), row.long()]
    lists = torch.zeros(2, 3, dtype=torch.int32)
    values = torch.zeros(2, 3)
    counts = torch.zeros(2, 40, dtype=torch.int32)
    bad = [
        (rk.LogitEdits(bias=(lists, values[:, :2])), ValueError),
        (rk.LogitEdits(bias=(lists.long(), values)), TypeError),
        (rk.LogitEdits(bias=(lists[:1], values[:1])), ValueError),
        (
            rk.LogitEdits(penalties=(counts[:, :39].contiguous(), row.int(), row, row, row)),
            ValueError,
        ),
        (rk.LogitEdits(penalties=(counts, row.long(), row, row, row)), TypeError),
        (rk.LogitEdits(min_tokens=(lists, row)), TypeError),
        (rk.LogitEdits(min_tokens=(lists, row[:1].long())), ValueError),
        (rk.LogitEdits(bitmask=torch.zeros(2, 1, dtype=torch.int32)), ValueError),
        (rk.LogitEdits(bitmask=torch.zeros(2, 2)), TypeError),
    ]
    for edits, error in bad:
        with pytest.raises(error):
            rk.top_k_top_p_sampling(logits, *good, edits=edits)
    with pytest.raises(ValueError, match="top_n"):
        rk.top_k_top_p_sampling_with_logprobs(logits, *good, 41)
