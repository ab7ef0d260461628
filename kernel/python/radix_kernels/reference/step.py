"""Between two calls of a model: the tensors of a step, and the tokens that it accepts."""

from __future__ import annotations

import torch


def fill_step_tensors(
    entries: torch.Tensor,
    tokens: torch.Tensor,
    sample_tokens: torch.Tensor,
    next_token: torch.Tensor,
    committed_len: torch.Tensor,
    row_pages: torch.Tensor,
    page_size: int,
    *,
    kv_lens: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    page_table: torch.Tensor,
    sample_positions: torch.Tensor,
) -> None:
    """See `radix_kernels.fill_step_tensors`. Integers: there is no compute dtype. A row's tokens
    lie within it, so an index outside of a tensor raises torch's IndexError on the CPU."""
    rows, bases, lengths, commits = entries.long().unbind()
    token_bases, offsets, starts, sources = tokens.long().unbind()
    new_lens = committed_len[bases] + lengths
    places = committed_len[token_bases] + offsets
    blocks = places // page_size
    pages = row_pages.flatten()[(starts + blocks).clamp(min=0)]
    slots = pages.long() * page_size + places % page_size
    # An id stands for itself, and any element may be looked at in its place.
    decoded = next_token.flatten()[(~sources).clamp(min=0)].clamp(min=0)
    kv_lens.copy_(new_lens)
    positions.copy_(places)
    slot_mapping.copy_(torch.where(starts < 0, -1, slots))
    input_ids.copy_(torch.where(sources < 0, decoded, sources))
    page_table.copy_(row_pages[rows, : page_table.shape[1]])
    sample_positions.copy_(places[sample_tokens.long()] + 1)
    committed_len[commits] = kv_lens


def accept_tokens(
    ids: torch.Tensor,
    rows: torch.Tensor,
    grow_rows: torch.Tensor,
    next_token: torch.Tensor,
    committed_len: torch.Tensor,
    *,
    cu_samples: torch.Tensor | None = None,
    drafts: torch.Tensor | None = None,
    all_drawn: bool = False,
    counts: torch.Tensor | None = None,
) -> None:
    """See `radix_kernels.accept_tokens`."""
    where = rows.long()
    first = last = ids
    accepted = torch.ones_like(rows)
    if cu_samples is not None and drafts is not None:
        starts = cu_samples[:-1].long()
        longest = int((cu_samples[1:] - cu_samples[:-1]).max()) if len(rows) else 1
        index = starts[:, None] + torch.arange(1, longest, device=ids.device)
        inside = index < cu_samples[1:, None]
        index = torch.where(inside, index, 1)
        agrees = inside & (drafts[index] == ids[index - 1])
        accepted = 1 + agrees.int().cumprod(1).sum(1, dtype=torch.int32)
        first = ids[starts]
        last = ids[starts + accepted - 1]
    if counts is not None:
        counts.copy_(accepted)
    if not all_drawn:
        has_drawn = first >= 0
        last = torch.where(has_drawn, last, next_token[where, 0])
        accepted = accepted * has_drawn
    next_token[where, 0] = last
    committed_len.index_add_(0, grow_rows, accepted)
