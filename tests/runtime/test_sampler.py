"""The sampler against a slow numpy model of the sampling definition, written from its text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radix_runtime.engine.sampler import Sampler
from radix_runtime.messages import pack_ids
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.step_plan import RowSampling

VOCAB = 151
CPU = torch.device("cpu")


def philox(seed, counter):
    """Philox4x32-10 (Salmon et al. 2011) on Python integers."""
    mask = 0xFFFFFFFF
    key = [seed & mask, (seed >> 32) & mask]
    c = list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c


def draw(logits, params, seed, position):
    """The token of one row from edited logits (float64)."""
    if params.temperature == 0:
        return int(np.argmax(logits))
    x = logits / np.float32(params.temperature)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    p = np.exp(x[order] - x[order[0]])
    p /= p.sum()
    if params.top_p < 1:
        keep = int(np.searchsorted(np.cumsum(p), params.top_p)) + 1
        order, p = order[:keep], p[:keep]
    kept = [i for i, q in zip(order, p, strict=True) if q >= params.min_p * p[0]]
    words = [philox(seed & (2**64 - 1), (i // 4, position, 0, 0))[i % 4] for i in range(len(x))]
    u = np.minimum((np.array(words, np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    noise = np.log(-np.log1p(-u))
    return max(sorted(kept), key=lambda i: (x[i] - noise[i], -i))


def edit(logits, params, prompt, output, stop_ids, early):
    x = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if params.has_penalties:
        for token in set(prompt) | set(output):
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        for token in set(output):
            count = output.count(token)
            x[token] -= params.frequency_penalty * count + params.presence_penalty
    if early:
        x[stop_ids] = -np.inf
    return x


CASES = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.6),
    SamplingParams(temperature=0.9, min_p=0.2, top_p=0.95, top_k=40),
    SamplingParams(temperature=0, repetition_penalty=1.4),
    SamplingParams(temperature=1.0, frequency_penalty=0.7, presence_penalty=0.4),
    SamplingParams(temperature=0.8, repetition_penalty=0.8, logit_bias={3: 4.0, 9: -100.0}),
    SamplingParams(temperature=0, logit_bias={0: 100.0}, frequency_penalty=2.0),
    SamplingParams(temperature=1.0, top_p=0.3, presence_penalty=-1.5, min_p=0.1),
    SamplingParams(temperature=0.7, top_k=2**40),  # more than there are ids
]


class Row:
    def __init__(self, number, params, rng):
        self.number, self.params = number, params
        self.seed = int(rng.integers(-(2**63), 2**63))
        self.prompt = rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
        self.output = []
        self.stop_ids = rng.choice(VOCAB, 2, replace=False).tolist()
        self.min_end = len(self.prompt) + int(rng.integers(0, 6))

    @property
    def position(self):
        return len(self.prompt) + len(self.output)

    def admission(self, **extra):
        with_counts = self.params.has_penalties
        return RowSampling(
            row=self.number,
            seed=self.seed,
            params=self.params,
            min_end=self.min_end,
            stop_ids=self.stop_ids,
            prompt_ids=pack_ids(self.prompt) if with_counts else b"",
            output_ids=pack_ids(self.output) if with_counts else b"",
            **extra,
        )

    def want(self, logits):
        early = self.position < self.min_end
        x = edit(logits, self.params, self.prompt, self.output, self.stop_ids, early)
        return draw(x, self.params, self.seed, self.position)


def step(sampler, rows, logits):
    numbers = np.array([r.number for r in rows], np.int32)
    positions = torch.tensor([r.position for r in rows], dtype=torch.int64)
    return sampler.sample(torch.from_numpy(logits.copy()), numbers, positions)


@pytest.mark.parametrize("seed", range(3))
def test_steps_follow_the_definition_whatever_the_batch(seed):
    """30 steps over changing subsets of rows, with rows taken out and readmitted elsewhere."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(32, vocab_size=VOCAB, device=CPU, max_samples=64)
    numbers = rng.permutation(32)
    rows = [Row(int(n), params=p, rng=rng) for n, p in zip(numbers, CASES, strict=False)]
    spare = [int(n) for n in numbers[len(rows) :]]
    for row in rows:
        sampler.admit(row.admission())
    for _ in range(30):
        if rng.random() < 0.3:  # retraction: the row comes back under another number
            row = rows[rng.integers(len(rows))]
            spare.insert(0, row.number)
            row.number = spare.pop()
            sampler.admit(row.admission())
        some = [r for r in rng.permutation(rows) if rng.random() < 0.7]
        logits = (rng.standard_normal((len(some), VOCAB)) * 3).astype(np.float32)
        want = [r.want(x) for r, x in zip(some, logits, strict=True)]
        got = step(sampler, some, logits)
        assert got.ids.dtype == torch.int32 and got.ids.tolist() == want
        assert got.logprobs is None
        for row, token in zip(some, want, strict=True):
            row.output.append(token)


def test_logprobs_are_those_of_the_raw_logits():
    rng = np.random.default_rng(5)
    sampler = Sampler(8, vocab_size=VOCAB, device=CPU, max_samples=64)
    rows = [Row(i, params=CASES[i], rng=rng) for i in (7, 0, 6, 4)]
    tops = {7: 3, 0: 0, 4: 5}
    for row in rows:
        wanted = row.number in tops
        top = tops.get(row.number, 9)  # without return_logprob the number means nothing
        sampler.admit(row.admission(return_logprob=wanted, top_logprobs=top))
    logits = (rng.standard_normal((4, VOCAB)) * 3).astype(np.float32)
    got = step(sampler, rows, logits)
    exact = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    assert got.top_ids.shape == got.top_logprobs.shape == (4, 5)
    for i, row in enumerate(rows):
        if row.number not in tops:
            assert got.logprobs[i].isnan() and got.top_logprobs[i].isnan().all()
            continue
        assert abs(got.logprobs[i] - exact[i, got.ids[i]]) < 1e-5
        values, ids = exact[i].topk(5)
        assert got.top_ids[i].tolist() == ids.tolist()
        assert torch.allclose(got.top_logprobs[i].double(), values, atol=1e-5)


def test_a_row_that_is_not_finite_hurts_no_other():
    rng = np.random.default_rng(6)
    sampler = Sampler(8, vocab_size=VOCAB, device=CPU, max_samples=64)
    rows = [Row(i, params=CASES[c], rng=rng) for i, c in enumerate((0, 1, 6, 0, 7))]
    for row in rows:
        sampler.admit(row.admission(return_logprob=True))
    logits = rng.standard_normal((5, VOCAB)).astype(np.float32)
    want = [r.want(x) for r, x in zip(rows, logits, strict=True)]
    logits[0, 17] = logits[2, 0] = np.nan
    got = step(sampler, rows, logits)
    assert got.ids.tolist() == [-1, want[1], -1, want[3], want[4]]
    assert torch.isfinite(got.logprobs[[1, 3, 4]]).all()
    greedy = step(sampler, [rows[0], rows[3]], logits[[0, 3]])
    assert greedy.ids.tolist() == [-1, want[3]]
    fine = rng.standard_normal((1, VOCAB)).astype(np.float32)  # nothing was counted for row 2
    assert step(sampler, [rows[2]], fine).ids.tolist() == [rows[2].want(fine[0])]


def test_greedy_takes_the_lowest_of_equals():
    sampler = Sampler(2, vocab_size=VOCAB, device=CPU, max_samples=64)
    sampler.admit(RowSampling(row=0, seed=1, params=SamplingParams(temperature=0)))
    sampler.admit(RowSampling(row=1, seed=1, params=SamplingParams(temperature=1, top_k=1)))
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, [7, 50, 120]] = 2.0
    ids = sampler.sample(torch.from_numpy(logits[:1]), np.array([0], np.int32), torch.tensor([3]))
    assert ids.ids.tolist() == [7]
    both = sampler.sample(
        torch.from_numpy(logits), np.array([0, 1], np.int32), torch.tensor([3, 3])
    )
    assert both.ids.tolist() == [7, 7]


def test_counts_exist_only_for_rows_with_penalties():
    rng = np.random.default_rng(8)
    sampler = Sampler(64, vocab_size=VOCAB, device=CPU, max_samples=64)
    for i in range(64):
        sampler.admit(Row(i, params=CASES[i % 5], rng=rng).admission())
    assert sampler._counts.shape[0] == 0
    for _ in range(50):  # the slot of a replaced row is used again
        sampler.admit(Row(5, params=CASES[6], rng=rng).admission())
    assert 0 < sampler._counts.shape[0] <= 4
    rows = [Row(i, params=CASES[6], rng=rng) for i in range(20)]
    for row in rows:
        sampler.admit(row.admission())
    logits = rng.standard_normal((20, VOCAB)).astype(np.float32)
    want = [r.want(x) for r, x in zip(rows, logits, strict=True)]
    assert step(sampler, rows, logits).ids.tolist() == want


def test_a_bitmask_allows_ids_behind_the_other_edits():
    rng = np.random.default_rng(9)
    sampler = Sampler(8, vocab_size=VOCAB, device=CPU, max_samples=64)
    rows = [Row(i, params=CASES[i], rng=rng) for i in (0, 1, 5, 6, 7, 4)]
    for row in rows:
        sampler.admit(row.admission(return_logprob=row.number == 4, top_logprobs=2))
    logits = (rng.standard_normal((len(rows), VOCAB)) * 3).astype(np.float32)
    allowed = rng.random((len(rows), VOCAB)) < 0.1
    allowed[:, 0] = True
    bits = np.zeros((len(rows), -(-VOCAB // 32) * 32), np.uint8)
    bits[:, :VOCAB] = allowed
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4")
    numbers = np.array([r.number for r in rows], np.int32)
    positions = torch.tensor([r.position for r in rows])
    given = torch.from_numpy(logits.copy())
    got = sampler.sample(given, numbers, positions, bitmask=torch.from_numpy(words))
    want = []
    for row, x, ids in zip(rows, logits, allowed, strict=True):
        early = row.position < row.min_end
        edited = edit(x, row.params, row.prompt, row.output, row.stop_ids, early)
        edited[~ids] = -np.inf
        want.append(draw(edited, row.params, row.seed, row.position))
    assert got.ids.tolist() == want
    raw = torch.log_softmax(torch.from_numpy(logits[5]).double(), -1)
    assert abs(got.logprobs[5] - raw[want[5]]) < 1e-5, "of the logits as the model gave them"
    assert got.logprobs[:5].isnan().all()


def test_several_samples_of_a_row_are_those_of_single_ones():
    rng = np.random.default_rng(10)
    sampler = Sampler(16, vocab_size=VOCAB, device=CPU, max_samples=64)
    rows = [Row(n, params=CASES[c], rng=rng) for n, c in ((3, 1), (0, 3), (7, 4))]
    rows[1].params = SamplingParams(temperature=1.3, top_p=0.6, logit_bias={5: 3.0})
    for row in rows:
        sampler.admit(row.admission(return_logprob=row.number == 7))
    counts = [3, 1, 4]
    samples = [(row, j) for row, n in zip(rows, counts, strict=True) for j in range(n)]
    logits = (rng.standard_normal((len(samples), VOCAB)) * 3).astype(np.float32)
    numbers = np.array([row.number for row, _ in samples], np.int32)
    positions = torch.tensor([row.position + j for row, j in samples])
    got = sampler.sample(torch.from_numpy(logits.copy()), numbers, positions)
    for i, (row, _) in enumerate(samples):
        one = sampler.sample(torch.from_numpy(logits[[i]]), numbers[[i]], positions[[i]])
        assert one.ids.tolist() == [got.ids[i]]
        if row.number == 7:
            assert one.logprobs.tolist() == [got.logprobs[i]]


def test_penalties_take_one_sample_of_a_row_a_step():
    rng = np.random.default_rng(11)
    sampler = Sampler(4, vocab_size=VOCAB, device=CPU, max_samples=64)
    for i, c in ((0, 5), (1, 1)):
        sampler.admit(Row(i, params=CASES[c], rng=rng).admission())
    logits = torch.zeros((3, VOCAB))
    rows = np.array([0, 1, 1], np.int32)
    assert len(sampler.sample(logits, rows, torch.tensor([9, 5, 6])).ids) == 3
    with pytest.raises(ValueError, match="a row with penalties takes one sample a step"):
        sampler.sample(logits, np.array([0, 0, 1], np.int32), torch.tensor([9, 10, 6]))


def test_greedy_is_what_needs_no_logits_but_the_largest():
    sampler = Sampler(8, vocab_size=VOCAB, device=CPU, max_samples=64)
    greedy = SamplingParams(temperature=0)
    others = [
        {"params": SamplingParams(temperature=0.5)},
        {"params": SamplingParams(temperature=0, logit_bias={3: 1.0})},
        {"params": SamplingParams(temperature=0, frequency_penalty=0.1)},
        {"params": greedy, "return_logprob": True},
        {"params": greedy, "min_end": 9, "stop_ids": [4]},
    ]
    sampler.admit(RowSampling(row=0, seed=1, params=greedy, min_end=9))  # with nothing to mask
    assert sampler.is_greedy(np.array([0, 7], np.int32))
    for row, state in enumerate(others, 1):
        sampler.admit(RowSampling(row=row, seed=1, **state))
        assert not sampler.is_greedy(np.array([0, row], np.int32))
    sampler.admit(RowSampling(row=1, seed=1, params=greedy))
    assert sampler.is_greedy(np.array([0, 1], np.int32))
