"""Log-probabilities: of given ids, of the drawn one, of the largest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import radix_kernels as rk
from tests.kernel.helpers import assert_same_bits, guarded, integers
from tests.kernel.sampling_cases import columns_of, random_row, sample, some_edits


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 32_003])
def test_token_logprobs(vocab_size, rng):
    rows = 5
    top_n = min(vocab_size, 6)
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


def test_logprobs_beside_the_draw(rng):
    """The ids of the draw alone, and log-probabilities of the logits as given, edits or not."""
    rows = [random_row(rng) for _ in range(9)]
    rows[3].temperature = 0.0
    logits = torch.randn(9, 777, generator=rng) * 3
    edits = some_edits(9, 777, rng)
    logits[5, 1] = math.nan
    edits.min_tokens[0][5] = -1  # nothing masks the NaN: the bitmask allows id 1
    columns = columns_of(rows)
    for case in (None, edits):
        ids, *found = rk.top_k_top_p_sampling_with_logprobs(logits, *columns, 4, edits=case)
        assert torch.equal(ids, sample(logits, rows, edits=case))
        assert ids[5] == -1 and math.isnan(float(found[0][5]))
        good = torch.arange(9) != 5
        for got, expected in zip(found, rk.token_logprobs(logits[good], ids[good], 4), strict=True):
            assert_same_bits(got[good], expected)
    none = [column[:0] for column in columns]
    results = rk.top_k_top_p_sampling_with_logprobs(logits[:0], *none)
    assert [len(x) for x in results] == [0, 0, 0, 0]


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


@pytest.mark.cpu_only
def test_token_logprobs_checks_ids():
    with pytest.raises(ValueError, match="ids"):
        rk.token_logprobs(torch.zeros(2, 8), torch.full((2,), 8, dtype=torch.int32))
