"""Random steps for the ops between two calls of a model, and what these should make of them, in
plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

POISON = -77
_CONTEXT = 150  # tokens that a row may have


@dataclass
class Step:
    """Arguments of `fill_step_tensors`; `made` are its outputs, poisoned."""

    entries: torch.Tensor
    tokens: torch.Tensor
    sample_tokens: torch.Tensor
    next_token: torch.Tensor
    committed_len: torch.Tensor
    row_pages: torch.Tensor
    page_size: int
    made: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def given(self) -> tuple[torch.Tensor | int, ...]:
        """The positional arguments."""
        return (
            self.entries,
            self.tokens,
            self.sample_tokens,
            self.next_token,
            self.committed_len,
            self.row_pages,
            self.page_size,
        )


class Sizes:
    """Random numbers of one generator."""

    def __init__(self, rng: torch.Generator) -> None:
        self.rng = rng

    def below(self, end: int) -> int:
        """0 .. end - 1."""
        return int(torch.randint(end, (1,), generator=self.rng))

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int32 in low .. high - 1."""
        return torch.randint(low, high, shape, generator=self.rng).to(torch.int32)


def random_step(
    rng: torch.Generator,
    *,
    decodes: int,
    chunks: int,
    padding: int,
    page_size: int,
    drafts: int = 1,
    width: int | None = None,
    spare: int | None = None,
) -> Step:
    """Of a table with `spare` rows that are not in the step, by default 0 to 2: `decodes` entries
    of up to `drafts` tokens, prompt chunks, then padding: tokens of the dummy
    row in a decode step, entries without tokens and tokens of no entry in one with chunks."""
    draw = Sizes(rng)
    rows = decodes + chunks + (draw.below(3) if spare is None else spare)
    dummy, scratch = rows, rows + 1
    pages = -(-_CONTEXT // page_size)
    committed = draw.ints(0, _CONTEXT // 2, rows + 2)
    committed[dummy:] = 0
    order = torch.randperm(max(rows, 1), generator=rng).tolist()
    entries: list[list[int]] = []
    tokens: list[list[int]] = []
    for row in order[:decodes]:
        count = 1 + draw.below(drafts)
        entries.append([row, row, count, scratch])
        tokens += [[row, j, row * pages, ~(row * drafts + j)] for j in range(count)]
    samples = list(range(len(tokens)))
    for row in order[decodes : decodes + chunks]:
        count = 1 + draw.below(9)
        end = count + draw.below(_CONTEXT - count)
        entries.append([row, dummy, end, row])
        ids = draw.ints(0, 1000, count).tolist()
        places = range(end - count, end)
        tokens += [[dummy, at, row * pages, i] for at, i in zip(places, ids, strict=True)]
        if draw.below(2):
            samples.append(len(tokens) - 1)
    nothing = ~(dummy * drafts)
    entries += [[dummy, dummy, 0 if chunks else 1, scratch]] * padding
    tokens += [[dummy, 0, -1, nothing]] * padding
    samples += [0] * padding if tokens else []
    width = pages if width is None else min(width, pages)
    step = Step(
        entries=_columns(entries, gap=3),
        tokens=_columns(tokens, gap=0),
        sample_tokens=torch.tensor(samples, dtype=torch.int32),
        next_token=draw.ints(-1, 1000, rows + 2, drafts),
        committed_len=committed,
        row_pages=draw.ints(0, 5000, rows + 1, pages),
        page_size=page_size,
    )
    step.made = poisoned(len(entries), len(tokens), len(samples), width)
    return step


def poisoned(entries: int, tokens: int, samples: int, width: int) -> dict[str, torch.Tensor]:
    """The outputs of `fill_step_tensors`."""

    def full(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, POISON, dtype=dtype)

    return {
        "kv_lens": full(entries),
        "input_ids": full(tokens),
        "positions": full(tokens),
        "slot_mapping": full(tokens, dtype=torch.int64),
        "page_table": full(entries, width),
        "sample_positions": full(samples, dtype=torch.int64),
    }


def _columns(items: list[list[int]], gap: int) -> torch.Tensor:
    """int32 [4, items], its rows `gap` elements apart."""
    block = torch.full((4, len(items) + gap), POISON, dtype=torch.int32)
    columns = block[:, : len(items)]
    columns.copy_(torch.tensor(items, dtype=torch.int32).reshape(-1, 4).T)
    return columns


def expected_fill(step: Step) -> dict[str, list[int] | list[list[int]]]:
    """The outputs, and `committed_len` afterwards, item by item."""
    committed = step.committed_len.tolist()
    table = step.row_pages.flatten().tolist()
    ids = step.next_token.flatten().tolist()
    size = step.page_size
    width = step.made["page_table"].shape[1]
    made: dict[str, list[int] | list[list[int]]] = {}
    columns = list(zip(*step.tokens.tolist(), strict=True))
    places = [committed[base] + offset for base, offset, _, _ in columns]
    made["positions"] = places
    made["slot_mapping"] = [
        -1 if start < 0 else table[start + at // size] * size + at % size
        for at, (_, _, start, _) in zip(places, columns, strict=True)
    ]
    made["input_ids"] = [
        source if source >= 0 else max(0, ids[-1 - source]) for *_, source in columns
    ]
    made["sample_positions"] = [places[token] + 1 for token in step.sample_tokens.tolist()]
    entries = list(zip(*step.entries.tolist(), strict=True))
    lengths = [committed[base] + more for _, base, more, _ in entries]
    made["kv_lens"] = lengths
    made["page_table"] = [step.row_pages[row, :width].tolist() for row, *_ in entries]
    after = list(committed)
    for (*_, commit), length in zip(entries, lengths, strict=True):
        after[commit] = length
    made["committed_len"] = after
    return made


@dataclass
class Samples:
    """Arguments of `accept_tokens`."""

    ids: torch.Tensor
    rows: torch.Tensor
    grow_rows: torch.Tensor
    next_token: torch.Tensor
    committed_len: torch.Tensor
    cu_samples: torch.Tensor | None = None
    drafts: torch.Tensor | None = None

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        """The positional arguments."""
        return self.ids, self.rows, self.grow_rows, self.next_token, self.committed_len


def random_samples(rng: torch.Generator, entries: int, *, most: int, ragged: bool) -> Samples:
    """Of entries with up to `most` samples. Every third id is -1; half of the drafts are right.
    Some entries are chunks, whose growth the last row takes."""
    draw = Sizes(rng)
    rows = entries + 2
    counts = [1 + draw.below(most) if ragged else 1 for _ in range(entries)]
    total = sum(counts)
    ids = draw.ints(0, 1000, total)
    ids[draw.ints(0, 3, total) == 0] = -1
    samples = Samples(
        ids=ids,
        rows=torch.randperm(rows - 1, generator=rng)[:entries].to(torch.int32),
        grow_rows=torch.full((entries,), rows - 1, dtype=torch.int32),
        next_token=draw.ints(0, 1000, rows, most),
        committed_len=draw.ints(0, 1000, rows),
    )
    grows = draw.ints(0, 2, entries) == 1
    samples.grow_rows[grows] = samples.rows[grows]
    if ragged:
        samples.cu_samples = torch.tensor([0, *counts], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        )
        right = draw.ints(0, 2, total) == 1
        right[:1] = False
        samples.drafts = torch.where(right, ids.roll(1), draw.ints(2000, 3000, total))
    return samples


def expected_accept(
    samples: Samples, *, all_drawn: bool
) -> tuple[list[int], list[list[int]], list[int]]:
    """Counts, `next_token` and `committed_len` afterwards, entry by entry."""
    ids = samples.ids.tolist()
    ends = list(range(len(samples.rows) + 1))
    drafts = [0] * len(ids)
    if samples.cu_samples is not None and samples.drafts is not None:
        ends = samples.cu_samples.tolist()
        drafts = samples.drafts.tolist()
    counts = []
    next_token = samples.next_token.tolist()
    committed = samples.committed_len.tolist()
    for entry, (row, grow) in enumerate(
        zip(samples.rows.tolist(), samples.grow_rows.tolist(), strict=True)
    ):
        first, end = ends[entry], ends[entry + 1]
        last = first
        while last + 1 < end and drafts[last + 1] == ids[last]:
            last += 1
        counts.append(last - first + 1)
        if ids[first] >= 0 or all_drawn:
            next_token[row][0] = ids[last]
            committed[grow] += counts[-1]
    return counts, next_token, committed
