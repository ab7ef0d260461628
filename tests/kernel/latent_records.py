"""What the tests of a decoder's latent attention share: columns, rows on pages, weights."""

from __future__ import annotations

from typing import Any

import torch

import radix_kernels as rk
from radix_kernels import decoder as records

PAGE = 4


def split(*sizes: int) -> list[records.Columns]:
    """Neighbouring columns of buffer 0."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        records.Columns(buffer=0, first=first, count=count)
        for first, count in zip(starts, sizes, strict=True)
    ]


def places(query: list[int], kv: list[int], rng: torch.Generator) -> dict[str, Any]:
    """Rows with so many new tokens, and tokens in all, on shuffled pages; pages that a row does not
    have are not there."""
    pages = torch.full((len(kv), 8), 2**30, dtype=torch.int32)
    order = torch.randperm(8 * len(kv), generator=rng).int()
    for row, length in enumerate(kv):
        count = -(-length // PAGE)
        pages[row, :count] = order[8 * row : 8 * row + count]
    spans = [torch.arange(n - q, n) for q, n in zip(query, kv, strict=True)]
    positions = torch.cat([torch.arange(0), *spans])
    rows = torch.repeat_interleave(torch.arange(len(kv)), torch.tensor(query).long())
    slots = pages[rows, positions // PAGE].long() * PAGE + positions % PAGE
    return {
        "positions": positions.int(),
        "slot_mapping": slots,
        "page_table": pages,
        "kv_lens": torch.tensor(kv).int(),
        "cu_seqlens_q": torch.tensor([0, *query]).cumsum(0).int(),
    }


def pack_heads(weights: torch.Tensor) -> rk.PackedHeads:
    """[H, N, K]."""
    return rk.PackedHeads(tuple(rk.pack_weight(weight.contiguous()) for weight in weights))
