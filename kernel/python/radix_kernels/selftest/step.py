"""The tensors of a step and its accepted tokens: integers, compared bit by bit."""

from __future__ import annotations

import torch

from .bounds import EXACT
from .trial import Trial, case, reference, rk

_ROWS = 9  # the last two: padding reads one, and what belongs to no row goes to the other
_PAGES = 12
_PAGE_SIZE = 16


@case
def fill_step_tensors(t: Trial) -> None:
    for decodes, padding in ((1, 0), (5, 3)):
        rows = t.shuffled(_ROWS - 2).int()[:decodes]
        dummy = torch.full((padding,), _ROWS - 2, dtype=torch.int32)
        both = torch.cat([rows, dummy])
        size = decodes + padding
        one = torch.ones(size, dtype=torch.int32)
        starts = torch.cat([rows * _PAGES, torch.full_like(dummy, -1)])
        entries = torch.stack([both, both, one, one * (_ROWS - 1)])
        tokens = torch.stack([both, one - 1, starts, ~both])
        committed = t.integers(0, _PAGES * _PAGE_SIZE - 1, _ROWS)
        committed[-2:] = 0
        next_token = t.integers(-1, 1000, _ROWS, 1)
        table = t.integers(0, 5000, _ROWS, _PAGES)
        samples = torch.arange(size, dtype=torch.int32)
        given = (entries, tokens, samples, next_token, committed, table)
        i64 = torch.int64
        outputs = {
            "kv_lens": t.poisoned(size),
            "input_ids": t.poisoned(size),
            "positions": t.poisoned(size),
            "slot_mapping": t.poisoned(size, dtype=i64),
            "page_table": t.poisoned(size, _PAGES),
            "sample_positions": t.poisoned(size, dtype=i64),
        }
        rk.fill_step_tensors(*map(t.there, given), _PAGE_SIZE, **outputs)
        expected = {name: torch.empty_like(x, device="cpu") for name, x in outputs.items()}
        reference.fill_step_tensors(*given, _PAGE_SIZE, **expected)
        for name, x in outputs.items():
            t.same(x, expected[name], EXACT)


@case
def accept_tokens(t: Trial) -> None:
    for drafts in (1, 3):
        count = 5
        ends = torch.arange(0, count * drafts + 1, drafts, dtype=torch.int32)
        ids = t.integers(-1, 4, count * drafts)
        rows = t.shuffled(_ROWS)[:count].int()
        tokens = t.integers(0, 1000, _ROWS, drafts)
        committed = t.integers(0, 1000, _ROWS)
        proposed = t.integers(0, 4, count * drafts)
        got = [t.there(x) for x in (tokens, committed)]
        rk.accept_tokens(
            *map(t.there, (ids, rows, rows)),
            *got,
            cu_samples=t.there(ends),
            drafts=t.there(proposed),
            counts=t.poisoned(count),
        )
        reference.accept_tokens(
            ids, rows, rows, tokens, committed, cu_samples=ends, drafts=proposed
        )
        t.same(got[0], tokens, EXACT)
        t.same(got[1], committed, EXACT)
