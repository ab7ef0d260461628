"""Draws equal the definition, for every filter, on every kind of row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import guarded, integers
from tests.kernel.sampling_cases import (
    FILTERS,
    Row,
    check_against_reference,
    clear_of_borders,
    draw_python,
    philox_python,
    random_row,
    sample,
)

# The known answers that the authors of Philox publish (Random123, kat_vectors, philox4x32 10).
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    tensors = [[torch.tensor(w) for w in words(text)] for text in (counter, key)]
    got = rk.reference.philox4x32(tuple(tensors[0]), tuple(tensors[1]))
    assert [int(word) for word in got] == words(expected)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 5, 257, 1000])
@pytest.mark.parametrize("stream", [0, 2])
def test_draws_equal_the_definition(vocab_size, stream, rng):
    rows = [random_row(rng) for _ in range(40)]
    logits = torch.randn(40, vocab_size, generator=rng) * 3
    ids = sample(logits, rows, stream=stream).tolist()
    checked = 0
    for i, row in enumerate(rows):
        expected, lead = draw_python(logits[i], row, stream)
        if lead > 1e-4 and clear_of_borders(logits[i], row):
            assert ids[i] == expected, vars(row)
            checked += 1
    assert checked >= 20


def test_one_row_at_a_time_and_strided(rng):
    """A draw depends on its row alone: not on the batch, its order, or the row stride."""
    rows = [random_row(rng) for _ in range(17)]
    holder = guarded((17, 333), torch.float32, gap=11)
    holder.view.copy_(torch.randn(17, 333, generator=rng))
    together = sample(holder.view, rows)
    holder.check()
    for i, row in enumerate(rows):
        assert int(sample(holder.view[i : i + 1].clone(), [row])) == int(together[i])
    order = torch.randperm(17, generator=rng)
    shuffled = sample(holder.view[order], [rows[i] for i in order.tolist()])
    assert torch.equal(shuffled, together[order])


def test_out_is_used(rng):
    logits = torch.randn(3, 50, generator=rng)
    out = torch.full((3,), -7, dtype=torch.int32)
    rows = [Row(seed=i) for i in range(3)]
    assert sample(logits, rows, out=out) is out
    assert torch.equal(out, sample(logits, rows))
    assert sample(torch.zeros(0, 50), []).shape == (0,)


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [-5.0, -5.0, -5.0, -5.0], [1.0, 2.0, 9.0, 9.0]])
    rows = [Row(temperature=0.0, seed=i, top_k=1 + i, top_p=0.1) for i in range(3)]
    assert sample(logits, rows).tolist() == [1, 0, 2]


def test_tiny_temperatures_are_greedy():
    logits = torch.tensor([[1.0, 5.0, 5.0], [-1.0, -9.0, -1.0]])
    assert sample(logits, [Row(temperature=1e-40), Row(temperature=1e-42)]).tolist() == [1, 0]
    assert sample(logits, [Row(temperature=1e-6)] * 2).tolist()[0] in (1, 2)


def test_temperatures_below_the_normal_numbers_are_greedy(rng):
    """Also where largest / temperature is finite, and where logits lie near each other even
    there."""
    filters = [
        {},
        {"top_p": 0.9},
        {"top_p": 0.9, "min_p": 0.1},
        {"top_k": 3, "top_p": 0.9},
        {"min_p": 0.5},
    ]
    rows = [
        Row(temperature=t, seed=i, **f)
        for i, f in enumerate(filters)
        for t in (1e-39, 4e-39, 1.17e-38)
    ]
    logits = torch.rand(len(rows), 3000, generator=rng) * 0.2
    logits[:, [700, 41, 2222]] = 0.3
    assert sample(logits, rows).tolist() == [41] * len(rows)
    near = torch.tensor([[1.0e-38, 1.1e-38, 1.1e-38]]).expand(60, -1).contiguous()
    assert (
        sample(near, [Row(temperature=4e-39, seed=i, **filters[i % 5]) for i in range(60)]).tolist()
        == [1] * 60
    )


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.45}], ids=str)
def test_ties_at_the_border_keep_the_lowest_ids(filters):
    """Four equal logits: the first two stay, whatever the draw."""
    logits = torch.zeros(400, 4)
    ids = sample(logits, [Row(seed=i, **filters) for i in range(400)])
    assert set(ids.tolist()) == {0, 1}


def test_min_p():
    logits = torch.log(torch.tensor([0.5, 0.26, 0.14, 0.1])).expand(600, 4).contiguous()
    ids = sample(logits, [Row(seed=i, min_p=0.4) for i in range(600)])
    assert set(ids.tolist()) == {0, 1}
    ids = sample(logits[:50], [Row(seed=i, min_p=1.0) for i in range(50)])
    assert set(ids.tolist()) == {0}


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.99}, {"top_k": 4}, {"top_k": 3, "top_p": 0.9}], ids=str
)
def test_the_first_has_every_min_p(filters, rng):
    """Of equals all have a min-p of 1, and the first alone has more."""
    logits = torch.randn(40, 1000, generator=rng)
    logits[:, [7, 300, 999]] = 9
    for min_p in (1.5, math.inf):
        assert set(
            sample(logits, [Row(seed=i, min_p=min_p, **filters) for i in range(40)]).tolist()
        ) == {7}
    assert set(sample(logits, [Row(seed=i, min_p=1.0, **filters) for i in range(40)]).tolist()) > {
        7
    }


def test_top_p_zero_keeps_the_first():
    logits = torch.tensor([[0.0, 1.0, 0.5]]).expand(50, 3).contiguous()
    assert set(sample(logits, [Row(seed=i, top_p=0.0) for i in range(50)]).tolist()) == {1}


@pytest.mark.parametrize("vocab_size", [1, 2])
def test_the_first_of_one_or_two_ids_stays_whatever_the_filters(vocab_size):
    logits = torch.tensor([[2.0, -1.0][:vocab_size]]).expand(40, vocab_size).contiguous()
    for given in (
        {"top_p": 0.0},
        {"top_p": -1.0},
        {"top_p": 0.0, "top_k": 1},
        {"top_p": 0.0, "min_p": 2.0},
    ):
        rows = [Row(seed=i, **given) for i in range(40)]
        assert sample(logits, rows).tolist() == [0] * 40, given
        check_against_reference(logits, rows)


@pytest.mark.parametrize(
    "others", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.9}], ids=str
)
def test_a_filter_that_is_no_number_is_off(others, rng):
    # No filter leaves few.
    logits = torch.rand(1, 300, generator=rng).mul(4).expand(60, 300).contiguous()
    plain = sample(logits, [Row(seed=i, **others) for i in range(60)]).tolist()
    for name in ("min_p", "top_p"):
        if name in others:
            continue
        rows = [Row(seed=i, **others, **{name: math.nan}) for i in range(60)]
        assert sample(logits, rows).tolist() == plain, name
        check_against_reference(logits, rows)
    assert len(set(plain)) > 3


def test_top_p_is_taken_of_what_top_k_left():
    """Of 0.4, 0.3, 0.2, 0.1 top-k 2 leaves 4/7 and 3/7: top-p 0.5 keeps one, 0.6 both."""
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1])).expand(200, 4).contiguous()
    few = sample(logits, [Row(seed=i, top_k=2, top_p=0.5) for i in range(200)])
    both = sample(logits, [Row(seed=i, top_k=2, top_p=0.6) for i in range(200)])
    assert set(few.tolist()) == {0} and set(both.tolist()) == {0, 1}


def test_masked_ids_are_never_drawn(rng):
    logits = torch.full((300, 64), -math.inf)
    allowed = torch.tensor([3, 17, 40])
    logits[:, allowed] = torch.randn(300, 3, generator=rng) * 10
    rows = [random_row(rng) for _ in range(300)]
    assert set(sample(logits, rows).tolist()) <= set(allowed.tolist())
    single = torch.full((2, 8), -math.inf)
    single[:, 5] = -3e38
    assert sample(single, [Row(), Row(temperature=0.0)]).tolist() == [5, 5]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_an_answer(temperature, rng):
    logits = torch.randn(5, 37, generator=rng)
    clean = sample(logits, [Row(temperature=temperature, seed=i) for i in range(5)])
    logits[1, 30] = math.nan
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    ids = sample(logits, [Row(temperature=temperature, seed=i) for i in range(5)])
    assert ids.tolist() == [int(clean[0]), -1, -1, -1, int(clean[4])]


def test_large_vocabulary(rng):
    logits = torch.randn(3, 151_936, generator=rng) * 4
    rows = [Row(seed=5, top_k=50, top_p=0.95), Row(seed=6, temperature=0.0), Row(seed=7)]
    ids = sample(logits, rows)
    top = torch.topk(logits[0], 50).indices
    assert int(ids[0]) in top.tolist()
    assert int(ids[1]) == int(logits[1].argmax())
    noise = -torch.log1p(-rk.reference.uniform(torch.tensor([7]), torch.tensor([0]), 151_936)[0])
    score = logits[2].double() - torch.log(noise.double())
    assert score[ids[2].item()] > score.max() - 1e-4


def test_uniform_words_and_range():
    """Word id % 4 of block id // 4, and never 0 or 1."""
    seed = 0x89ABCDEF01234567 - 2**64
    position = 2**32 + 77
    u = rk.reference.uniform(torch.tensor([seed]), torch.tensor([position]), 4001, 1)[0]
    for i in (0, 1, 2, 3, 4, 4000):
        word = philox_python([i // 4, 77, 1, 0], [0x01234567, 0x89ABCDEF])[i % 4]
        assert float(u[i]) == float(np.float32((word + 0.5) * 2.0**-32))
    assert 0 < float(u.min()) and float(u.max()) <= 1 - 2.0**-24


@pytest.mark.parametrize("spread", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("vocab_size", [50_257, 151_936])
def test_real_vocabularies_equal_the_reference(vocab_size, spread, rng):
    """From flat rows, where a filter keeps most of the vocabulary, to those of a trained model."""
    rows = [
        Row(seed=7 * i, position=i, temperature=0.7 + 0.1 * i, **f) for i, f in enumerate(FILTERS)
    ]
    logits = torch.randn(len(rows), vocab_size, generator=rng) * spread
    check_against_reference(logits, rows)


@pytest.mark.parametrize("distance", [1, 4, 130, 2500])
def test_few_likely_ids(distance, rng):
    """Their noise is far from what bounds it, so that the best score need not have the best
    bound."""
    logits = torch.full((128, 32_003), -60.0)
    first = 4 * int(integers(0, 1000, (), rng))
    logits[:, first : first + 8 * distance : distance] = torch.randn(128, 8, generator=rng)
    check_against_reference(
        logits, [Row(seed=i, position=distance, temperature=0.7) for i in range(128)]
    )


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_many_equal_logits(filters, rng):
    """Rows of one value, of a few values, and of a few allowed ids: borders cut through ties."""
    logits = torch.zeros(4, 20_000)
    logits[1] = integers(0, 3, (20_000,), rng).float()
    logits[2] = -math.inf
    logits[2, integers(0, 20_000, (40,), rng)] = 1.5
    logits[3] = torch.randn(20_000, generator=rng).half().float() * 0.1
    check_against_reference(logits, [Row(seed=i, **filters) for i in range(4)])


def test_a_row_does_not_depend_on_its_batch(rng):
    """The same row alone and in batches that are split otherwise over the machine."""
    vocab_size = 32_003
    rows = [Row(seed=i, **FILTERS[i % len(FILTERS)]) for i in range(300)]
    logits = torch.randn(300, vocab_size, generator=rng) * 3
    together = sample(logits, rows)
    assert torch.equal(together, sample(logits, rows))
    for n in (1, 17, 65):
        assert torch.equal(sample(logits[:n], rows[:n]), together[:n])


def test_errors():
    logits = torch.zeros(2, 8)
    row = torch.ones(2)
    good = [row, row.int(), row, row, row.long(), row.long()]
    for index, value in ((0, row.double()), (1, row.long()), (4, row.int()), (5, row[:1].long())):
        args = list(good)
        args[index] = value
        with pytest.raises((TypeError, ValueError)):
            rk.top_k_top_p_sampling(logits, *args)
    with pytest.raises(TypeError, match="logits"):
        rk.top_k_top_p_sampling(logits.half(), *good)
    with pytest.raises(ValueError, match="out"):
        rk.top_k_top_p_sampling(logits, *good, out=torch.zeros(3, dtype=torch.int32))
    slots = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="counts"):
        rk.apply_penalties_inplace(
            logits, torch.zeros(2, 7, dtype=torch.int32), slots, row, row, row
        )
    with pytest.raises(TypeError, match="counts"):
        rk.count_tokens_inplace(torch.zeros(2, 8), slots, slots)
    with pytest.raises(ValueError, match="top_n"):
        rk.token_logprobs(logits, slots, 9)
