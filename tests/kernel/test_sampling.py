from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import assert_close, assert_same_bits, guarded, integers

# The known answers that the authors of Philox publish (Random123, kat_vectors, philox4x32 10).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    tensors = [[torch.tensor(w) for w in words(text)] for text in (counter, key)]
    got = rk.reference.philox4x32(tuple(tensors[0]), tuple(tensors[1]))
    assert [int(word) for word in got] == words(expected)


def philox_python(counter: list[int], key: list[int]) -> list[int]:
    """The cipher again, in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


class Row:
    """The parameters of one row, with neutral defaults."""

    def __init__(self, **given: Any) -> None:
        self.temperature, self.top_k, self.top_p, self.min_p = 1.0, 0, 1.0, 0.0
        self.seed, self.position = 0, 0
        vars(self).update(given)


def sample(logits: torch.Tensor, rows: list[Row], **options: Any) -> torch.Tensor:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

    before = logits.clone()
    ids = rk.top_k_top_p_sampling(
        logits,
        column("temperature", torch.float32),
        column("top_k", torch.int32),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
        column("seed", torch.int64),
        column("position", torch.int64),
        **options,
    )
    assert_same_bits(logits, before)
    assert ids.dtype == torch.int32 and ids.shape == (len(rows),)
    return ids


def kept_python(x: np.ndarray, row: Row) -> list[int]:
    """The ids that the filters leave, from the definition, in float64."""
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if 0 < row.top_k < len(x):
        order = order[: row.top_k]
    weights = np.exp(x[order].astype(np.float64) - float(x[order[0]]))
    mass = weights / weights.sum()
    kept, before = [], 0.0
    for i, share in zip(order, mass, strict=True):
        if kept and row.top_p < 1 and before >= row.top_p:
            break
        kept.append(i)
        before += share
    if row.min_p > 0:
        floor = row.min_p * mass[0]
        kept = [i for i, share in zip(kept, mass, strict=False) if share >= floor]
    return [i for i in kept if x[i] > -np.inf]


def draw_python(logits: torch.Tensor, row: Row, stream: int = 0) -> tuple[int, float]:
    """The id by the definition and the lead of its score over the next."""
    x = (logits / np.float32(row.temperature)).numpy()
    seed = row.seed & (2**64 - 1)
    scores = {}
    for i in kept_python(x, row):
        counter = [i // 4, row.position & 0xFFFFFFFF, stream, 0]
        word = philox_python(counter, [seed & 0xFFFFFFFF, seed >> 32])[i % 4]
        u = min((word + 0.5) * 2.0**-32, 1 - 2.0**-24)
        scores[i] = float(x[i]) - math.log(-math.log1p(-u))
    best = sorted(scores, key=lambda i: (-scores[i], i))
    lead = scores[best[0]] - scores[best[1]] if len(best) > 1 else math.inf
    return best[0], lead


def random_row(rng: torch.Generator) -> Row:
    def pick(*values: float) -> float:
        return values[int(integers(0, len(values), (), rng))]

    return Row(
        temperature=pick(0.3, 0.7, 1.0, 1.9),
        top_k=int(pick(0, -1, 1, 2, 7, 10**6)),
        top_p=pick(1.0, 0.9, 0.5, 0.05, 1.5),
        min_p=pick(0.0, 0.02, 0.3),
        seed=int(integers(-(2**62), 2**62, (), rng)),
        position=int(integers(0, 2**20, (), rng)),
    )


def clear_of_borders(logits: torch.Tensor, row: Row) -> bool:
    """No prefix mass within 1e-4 of top_p and no probability within 1e-4 of the min-p floor."""
    x = (logits / np.float32(row.temperature)).double()
    values = torch.sort(x, descending=True, stable=True).values
    if 0 < row.top_k < len(values):
        values = values[: row.top_k]
    mass = torch.softmax(values, -1)
    ratio = mass / mass[0]
    near_p = ((mass.cumsum(0) - mass - row.top_p).abs() < 1e-4).any()
    near_m = row.min_p > 0 and ((ratio - row.min_p).abs() < 1e-4 * row.min_p).any()
    return not (near_p or near_m)


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


def test_seed_position_and_stream_change_the_draw(rng):
    """Ten draws from 1,000 ids: two ways agree on all ten once in 10**30 runs."""
    logits = torch.zeros(10, 1000)
    seed = int(integers(0, 2**60, (), rng))
    ways = {"seed": seed, "low": seed ^ 1, "high": seed ^ (1 << 62)}
    draws = {name: sample(logits, [Row(seed=s, position=100 * i) for i in range(10)]) for name, s in ways.items()}
    draws["position"] = sample(logits, [Row(seed=seed, position=100 * i + 1) for i in range(10)])
    draws["stream"] = sample(logits, [Row(seed=seed, position=100 * i) for i in range(10)], stream=1)
    assert len({tuple(ids.tolist()) for ids in draws.values()}) == len(draws)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution_chi_square(temperature, rng):
    """20,000 draws of one row follow the softmax."""
    draws, vocab_size = 20_000, 11
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


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [-5.0, -5.0, -5.0, -5.0], [1.0, 2.0, 9.0, 9.0]])
    rows = [Row(temperature=0.0, seed=i, top_k=1 + i, top_p=0.1) for i in range(3)]
    assert sample(logits, rows).tolist() == [1, 0, 2]


def test_tiny_temperatures_are_greedy():
    logits = torch.tensor([[1.0, 5.0, 5.0], [-1.0, -9.0, -1.0]])
    assert sample(logits, [Row(temperature=1e-40), Row(temperature=1e-42)]).tolist() == [1, 0]
    assert sample(logits, [Row(temperature=1e-6)] * 2).tolist()[0] in (1, 2)


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


def test_top_p_zero_keeps_the_first():
    logits = torch.tensor([[0.0, 1.0, 0.5]]).expand(50, 3).contiguous()
    assert set(sample(logits, [Row(seed=i, top_p=0.0) for i in range(50)]).tolist()) == {1}


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
    seed, position = 0x89ABCDEF01234567 - 2**64, 2**32 + 77
    u = rk.reference.uniform(torch.tensor([seed]), torch.tensor([position]), 4001, 1)[0]
    for i in (0, 1, 2, 3, 4, 4000):
        word = philox_python([i // 4, 77, 1, 0], [0x01234567, 0x89ABCDEF])[i % 4]
        assert float(u[i]) == float(np.float32((word + 0.5) * 2.0**-32))
    assert 0 < float(u.min()) and float(u.max()) <= 1 - 2.0**-24


IN_PROMPT = 1 << 30


def test_penalties(rng):
    batch, vocab_size, slots_total = 6, 90, 9
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
        for t in range(vocab_size if slot >= 0 else 0):
            word, x = int(counts[slot, t]), float(before[b, t])
            n = word & (IN_PROMPT - 1)
            if word:
                x = x / float(rep[b]) if x > 0 else x * float(rep[b])
            expected[b, t] = x - float(freq[b]) * n - float(pres[b]) * (n > 0)
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
    ones, zeros = torch.ones(2), torch.zeros(2)
    rk.apply_penalties_inplace(logits, counts, torch.tensor([0, 1], dtype=torch.int32), ones, zeros, zeros)
    assert_same_bits(logits, before)


def test_count_tokens(rng):
    counts = torch.zeros(4, 10, dtype=torch.int32)
    counts[1, 2] = IN_PROMPT
    slots = torch.tensor([1, 1, -1, 3, 0], dtype=torch.int32)
    ids = torch.tensor([2, 2, 5, 9, -1], dtype=torch.int32)
    rk.count_tokens_inplace(counts, slots, ids)
    expected = torch.zeros(4, 10, dtype=torch.int32)
    expected[1, 2], expected[3, 9] = IN_PROMPT + 2, 1
    assert torch.equal(counts, expected)
    rk.count_tokens_inplace(counts, slots[:0], ids[:0])
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 32_003])
def test_token_logprobs(vocab_size, rng):
    rows, top_n = 5, min(vocab_size, 6)
    holder = guarded((rows, vocab_size), torch.float32, gap=5)
    holder.view.copy_(torch.randn(rows, vocab_size, generator=rng) * 6)
    ids = integers(0, vocab_size, (rows,), rng).to(torch.int32)
    a = holder.view.double().numpy()
    shifted = a - a.max(-1, keepdims=True)
    expected = torch.from_numpy(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
    logprob, top, top_ids = rk.token_logprobs(holder.view, ids, top_n)
    assert (logprob.dtype, top.dtype, top_ids.dtype) == (torch.float32, torch.float32, torch.int32)
    picked = expected.gather(1, ids.long()[:, None]).squeeze(1)
    assert (logprob.double() - picked).abs().max() < 2e-5
    order = torch.sort(holder.view, dim=-1, descending=True, stable=True).indices[:, :top_n]
    assert torch.equal(top_ids.long(), order)
    assert (top.double() - expected.gather(1, order)).abs().max() < 2e-5
    assert (top <= 0).all()


def test_token_logprobs_ties_masks_and_skips():
    logits = torch.tensor([[1.0, 5.0, 5.0, -math.inf], [2.0, 2.0, 2.0, 2.0]])
    logprob, top, top_ids = rk.token_logprobs(logits, torch.tensor([3, -1], dtype=torch.int32), 3)
    assert float(logprob[0]) == -math.inf and math.isnan(float(logprob[1]))
    assert top_ids.tolist() == [[1, 2, 0], [0, 1, 2]]
    assert float(top[1, 0]) == pytest.approx(-math.log(4), abs=1e-6)
    none = rk.token_logprobs(logits, torch.tensor([0, 0], dtype=torch.int32))
    assert none[1].shape == none[2].shape == (2, 0)


# ------------------------------------------------------------------ edits on the way


def some_edits(batch: int, vocab_size: int, rng: torch.Generator) -> rk.LogitEdits:
    """All four steps, with values that round the same in any order; rows without each of them."""
    few = max(1, min(5, vocab_size))
    bias_ids = integers(0, vocab_size, (batch, few), rng).to(torch.int32)
    bias_ids[0, 0] = bias_ids[0, -1]  # twice the same
    bias_ids[1, few // 2 :] = -1
    bias_values = integers(-8, 9, (batch, few), rng).float() / 4
    counts = integers(0, 3, (batch + 1, vocab_size), rng).to(torch.int32)
    counts[integers(0, 2, counts.shape, rng).bool()] |= IN_PROMPT
    slots = torch.randperm(batch + 1, generator=rng)[:batch].to(torch.int32)
    slots[2 % batch] = -1
    rep, freq, pres = (integers(1, 5, (batch,), rng).float() / 4 + 0.5 for _ in range(3))
    stops = integers(0, vocab_size, (batch, 3), rng).to(torch.int32)
    stops[0, 1] = -1
    min_position = integers(0, 2, (batch,), rng) * 2**40
    bitmask = integers(-(2**31), 2**31, (batch, -(-vocab_size // 32)), rng).to(torch.int32)
    bitmask[:, 0] |= 3
    return rk.LogitEdits((bias_ids, bias_values), (counts, slots, rep, freq, pres), (stops, min_position), bitmask)


def edited_python(logits: torch.Tensor, rows: list[Row], edits: rk.LogitEdits) -> torch.Tensor:
    """The edits by the definition, an id at a time, in float32."""
    out = logits.clone()
    f32 = np.float32
    for b, row in enumerate(rows):
        x = [f32(v) for v in logits[b].tolist()]
        if edits.bias is not None:
            for i, value in zip(*(t[b].tolist() for t in edits.bias), strict=True):
                if i < 0:
                    break
                x[i] += f32(value)
        if edits.penalties is not None:
            counts, slots, rep, freq, pres = edits.penalties
            words = counts[int(slots[b])].tolist() if slots[b] >= 0 else [0] * len(x)
            r, f, p = (f32(float(t[b])) for t in (rep, freq, pres))
            for i, word in enumerate(words):
                if word:
                    x[i] = x[i] / r if x[i] > 0 else x[i] * r
                if word & (IN_PROMPT - 1):
                    x[i] -= f * f32(word & (IN_PROMPT - 1)) + p
        if edits.min_tokens is not None and row.position < int(edits.min_tokens[1][b]):
            for i in edits.min_tokens[0][b].tolist():
                if i < 0:
                    break
                x[i] = f32(-math.inf)
        if edits.bitmask is not None:
            words = edits.bitmask[b].tolist()
            x = [v if words[i // 32] >> (i % 32) & 1 else f32(-math.inf) for i, v in enumerate(x)]
        out[b] = torch.tensor(np.array(x))
    return out


def only(edits: rk.LogitEdits, name: str) -> rk.LogitEdits:
    return rk.LogitEdits(**{name: getattr(edits, name)})


@pytest.mark.parametrize("vocab_size", [1, 2, 67, 256, 1000])
def test_reference_edits_equal_the_definition(vocab_size, rng):
    rows = [random_row(rng) for _ in range(6)]
    logits = torch.randn(6, vocab_size, generator=rng) * 3
    edits = some_edits(6, vocab_size, rng)
    position = torch.tensor([row.position for row in rows])
    for case in (edits, *(only(edits, name) for name in ("bias", "penalties", "min_tokens", "bitmask"))):
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
    for case in (edits, *(only(edits, name) for name in ("bias", "penalties", "min_tokens", "bitmask"))):
        expected = sample(edited_python(holder.view, rows, case), rows)
        assert torch.equal(sample(holder.view, rows, edits=case), expected)
    holder.check()


def test_logprobs_beside_the_draw(rng):
    """The ids of the draw alone, and log-probabilities of the logits as given, edits or not."""
    rows = [random_row(rng) for _ in range(9)]
    rows[3].temperature = 0.0
    logits = torch.randn(9, 777, generator=rng) * 3
    edits = some_edits(9, 777, rng)
    logits[5, 1] = math.nan
    edits.min_tokens[0][5] = -1  # nothing masks the NaN: the bitmask allows id 1
    columns = [
        torch.tensor([getattr(row, name) for row in rows], dtype=dtype)
        for name, dtype in (
            ("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32),
            ("min_p", torch.float32), ("seed", torch.int64), ("position", torch.int64),
        )
    ]  # fmt: skip
    for case in (None, edits):
        ids, *found = rk.top_k_top_p_sampling_with_logprobs(logits, *columns, 4, edits=case)
        assert torch.equal(ids, sample(logits, rows, edits=case))
        assert ids[5] == -1 and math.isnan(float(found[0][5]))
        good = torch.arange(9) != 5
        for got, expected in zip(found, rk.token_logprobs(logits[good], ids[good], 4), strict=True):
            assert_same_bits(got[good], expected)
    assert [len(x) for x in rk.top_k_top_p_sampling_with_logprobs(logits[:0], *(c[:0] for c in columns))] == [0] * 4


# ------------------------------------------------------------------ real vocabularies


def near_tie(logits: torch.Tensor, row: Row) -> bool:
    """Whether the rounding of float32 may decide the row: a border or two scores within 1e-4."""
    x = (logits / np.float32(row.temperature)).double()
    order = torch.sort(x, descending=True, stable=True)
    count = row.top_k if 0 < row.top_k < len(x) else len(x)
    mass = torch.softmax(order.values[:count], 0)
    before = mass.cumsum(0) - mass
    kept = torch.ones(count, dtype=torch.bool)
    if row.top_p < 1:
        if ((before - row.top_p).abs() < 1e-5).any():
            return True
        kept &= before < row.top_p
    if row.min_p > 0:
        ratio = mass / mass[0]
        if ((ratio / row.min_p - 1).abs() < 1e-5).any():
            return True
        kept &= ratio >= row.min_p
    u = rk.reference.uniform(torch.tensor([row.seed]), torch.tensor([row.position]), len(x))[0].double()
    scores = (x - torch.log(-torch.log1p(-u)))[order.indices[:count][kept]]
    best = scores.topk(min(2, len(scores))).values
    return len(best) == 2 and float(best[0] - best[1]) < 1e-4


FILTERS = [
    {}, {"top_k": 1}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"top_k": 1000}, {"top_k": 3000, "min_p": 0.01},
    {"top_k": 20_000, "top_p": 0.8}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_p": 0.95, "min_p": 0.1}, {"min_p": 0.05},
    {"min_p": 1e-6}, {"top_p": 0.999},
]  # fmt: skip


@pytest.mark.parametrize("spread", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("vocab_size", [50_257, 151_936])
def test_real_vocabularies_equal_the_reference(vocab_size, spread, rng):
    """From flat rows, where a filter keeps most of the vocabulary, to those of a trained model."""
    rows = [Row(seed=7 * i, position=i, temperature=0.7 + 0.1 * i, **f) for i, f in enumerate(FILTERS)]
    logits = torch.randn(len(rows), vocab_size, generator=rng) * spread
    check_against_reference(logits, rows)


def check_against_reference(logits: torch.Tensor, rows: list[Row]) -> None:
    ids = sample(logits, rows)
    columns = (
        torch.tensor([getattr(row, name) for row in rows], dtype=dtype)
        for name, dtype in (
            ("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32),
            ("min_p", torch.float32), ("seed", torch.int64), ("position", torch.int64),
        )
    )  # fmt: skip
    expected = rk.reference.top_k_top_p_sampling(logits, *columns)
    for i in torch.nonzero(ids != expected).flatten().tolist():
        assert near_tie(logits[i], rows[i]), vars(rows[i])


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


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9}])
def test_distribution_of_each_filter(filters, request, rng):
    """A million draws (fewer on the CPU) of one row follow the renormalised softmax of what the filters keep."""
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
    bound = freedom * (1 - 2 / (9 * freedom) + 6 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-6
    assert chi_square < bound


@pytest.mark.parametrize("top_n", [0, 1, 5, 60, 3000])
def test_top_logprobs_of_flat_and_tied_rows(top_n, rng):
    logits = torch.randn(4, 40_003, generator=rng) * 0.3
    logits[1] = integers(0, 4, (40_003,), rng).float()
    logits[2, 100:] = -math.inf
    logits[3] = 2.5
    ids = torch.tensor([7, 40_002, 100, -1], dtype=torch.int32)
    logprob, top, top_ids = rk.token_logprobs(logits, ids, top_n)
    wide = torch.log_softmax(logits.double(), -1)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_n]
    assert torch.equal(top_ids.long(), order)
    expected = wide.gather(1, order)
    assert torch.equal(torch.isinf(top), torch.isinf(expected))
    assert bool(((top.double() - expected).nan_to_num(0, 0, 0).abs() < 2e-5).all())
    assert abs(float(logprob[0].double() - wide[0, 7])) < 2e-5 and math.isnan(float(logprob[3]))


def test_errors_of_edits():
    logits, row = torch.zeros(2, 40), torch.ones(2)
    good = [row, row.int(), row, row, row.long(), row.long()]
    lists, values = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3)
    counts = torch.zeros(2, 40, dtype=torch.int32)
    bad = [
        (rk.LogitEdits(bias=(lists, values[:, :2])), ValueError),
        (rk.LogitEdits(bias=(lists.long(), values)), TypeError),
        (rk.LogitEdits(bias=(lists[:1], values[:1])), ValueError),
        (rk.LogitEdits(penalties=(counts[:, :39].contiguous(), row.int(), row, row, row)), ValueError),
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


def test_errors():
    logits, row = torch.zeros(2, 8), torch.ones(2)
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
        rk.apply_penalties_inplace(logits, torch.zeros(2, 7, dtype=torch.int32), slots, row, row, row)
    with pytest.raises(TypeError, match="counts"):
        rk.count_tokens_inplace(torch.zeros(2, 8), slots, slots)
    with pytest.raises(ValueError, match="top_n"):
        rk.token_logprobs(logits, slots, 9)


@pytest.mark.cpu_only
def test_token_logprobs_checks_ids():
    with pytest.raises(ValueError, match="ids"):
        rk.token_logprobs(torch.zeros(2, 8), torch.full((2,), 8, dtype=torch.int32))
