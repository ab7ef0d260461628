"""Draws, penalties and log-probabilities. A draw is compared with the reference's, id for id."""

from __future__ import annotations

from typing import Any

import torch

from .bounds import DRAWS, EXACT, LOGPROB, ROUNDED_ONCE
from .trial import Trial, case, reference, rk

_ROWS = 64
_SIZES = (1000, 4097)
_PROMPT = 1 << 30  # the bit of a count that says: in the prompt


def _settings(t: Trial) -> list[torch.Tensor]:
    """Temperature, top-k, top-p, min-p, seed and position of _ROWS rows; an eighth is greedy."""
    temperature = 0.5 + t.rand(_ROWS)
    temperature[::8] = 0
    top_k = t.integers(-1, 50, _ROWS)
    top_p = 0.5 + t.rand(_ROWS) / 2
    top_p[::4] = 1
    min_p = t.rand(_ROWS) / 10
    min_p[::2] = 0
    seed = t.integers(0, 2**62, _ROWS, dtype=torch.int64)
    position = t.integers(0, 10000, _ROWS, dtype=torch.int64)
    return [temperature, top_k, top_p, min_p, seed, position]


def _logits(t: Trial, size: int) -> torch.Tensor:
    return 3 * t.randn(_ROWS, size, dtype=torch.float32)


@case
def top_k_top_p_sampling(t: Trial) -> None:
    for size in _SIZES:
        logits = _logits(t, size)
        settings = _settings(t)
        out = t.poisoned(_ROWS, dtype=torch.int32)
        rk.top_k_top_p_sampling(t.there(logits), *map(t.there, settings), out=out)
        expected = reference.top_k_top_p_sampling(logits.double(), *settings)
        t.same(out, expected.int(), DRAWS)


@case
def top_k_top_p_sampling_with_logprobs(t: Trial) -> None:
    for size in _SIZES:
        logits = _logits(t, size)
        settings = _settings(t)
        got = rk.top_k_top_p_sampling_with_logprobs(t.there(logits), *map(t.there, settings), 5)
        ids, *logprobs = (x.cpu() for x in got)
        t.same(ids, reference.top_k_top_p_sampling(logits.double(), *settings).int(), DRAWS)
        _check_logprobs(t, logits, ids, logprobs)


@case
def token_logprobs(t: Trial) -> None:
    for size in _SIZES:
        logits = _logits(t, size)
        ids = t.integers(0, size, _ROWS)
        _check_logprobs(t, logits, ids, rk.token_logprobs(t.there(logits), t.there(ids), 5))


def _check_logprobs(t: Trial, logits: torch.Tensor, ids: torch.Tensor, got: Any) -> None:
    exact = reference.token_logprobs(logits.double(), ids, 5)
    t.same(got[2], exact[2].int(), EXACT)
    for one, other in zip(got[:2], exact[:2], strict=True):
        t.keep(float((one.cpu().double() - other).abs().max()), LOGPROB)


@case
def apply_penalties_inplace(t: Trial) -> None:
    for size in _SIZES:
        logits = _logits(t, size)
        counts = _counts(t, size)
        slots = t.shuffled(_ROWS).int()
        slots[3] = -1
        factors = [1 + t.rand(_ROWS), t.rand(_ROWS), t.rand(_ROWS)]
        got = t.there(logits)
        rk.apply_penalties_inplace(got, *map(t.there, (counts, slots, *factors)))
        exact = logits.double()
        reference.apply_penalties_inplace(exact, counts, slots, *(f.double() for f in factors))
        t.near(got, exact, ROUNDED_ONCE["float32"])


@case
def count_tokens_inplace(t: Trial) -> None:
    for size in _SIZES:
        counts = _counts(t, size)
        slots = t.integers(-1, _ROWS, 40)
        ids = t.integers(-1, size, 40)
        slots[1] = slots[0]
        ids[1] = ids[0]
        got = t.there(counts)
        rk.count_tokens_inplace(got, t.there(slots), t.there(ids))
        reference.count_tokens_inplace(counts, slots, ids)
        t.same(got, counts, EXACT)


def _counts(t: Trial, size: int) -> torch.Tensor:
    seen = t.integers(0, 8, _ROWS, size)
    in_prompt = t.integers(0, 2, _ROWS, size) * _PROMPT
    return torch.where(seen > 5, seen - 5, 0).int() + in_prompt


@case
def sampling_candidates(t: Trial) -> None:
    """A record leaves words unwritten, so it is compared by what is drawn from it."""
    for size in _SIZES:
        _draw_from_shards(t, size, rk.sampling_candidates, reference.sample_candidates, t.there)


@case
def sample_candidates(t: Trial) -> None:
    for size in _SIZES:
        _draw_from_shards(t, size, reference.sampling_candidates, rk.sample_candidates, _as_it_is)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _draw_from_shards(t: Trial, size: int, list_them: Any, draw: Any, there: Any) -> None:
    """One of the two functions is the op, the other the reference, which runs on the CPU."""
    logits = _logits(t, size)
    settings = _settings(t)
    border = size // 8 * 4
    lists_there = [there(x) for x in settings]
    records = [
        list_them(
            there(logits[:, first:last].contiguous()),
            *lists_there,
            first_id=first,
            vocab_size=size,
            num_candidates=256,
        ).cpu()
        for first, last in ((0, border), (border, size))
    ]
    move = t.there if draw is rk.sample_candidates else _as_it_is
    got = draw(move(torch.stack(records)), *map(move, settings), vocab_size=size).cpu()
    expected = reference.top_k_top_p_sampling(logits.double(), *settings).int()
    expected = torch.where(got == -2, -2, expected)  # too few were listed, which a row may say
    t.same(got.int(), expected.int(), DRAWS)
    t.keep(float((got == -2).double().mean()), 0.5)
