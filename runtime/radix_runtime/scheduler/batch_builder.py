"""From a Decision to the StepPlan, taking rows and pages on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..messages import pack_ids
from ..step_plan import FROM_PROMPT, LogprobSpan, RowSampling, StepHandle, StepPlan
from .lifecycle import Lifecycle
from .policy import Decision
from .request import Request, State

LOGPROB_BLOCK = 1024  # rows of prompt logits that are alive at once


@dataclass(slots=True)
class Entry:
    """One request in a step: its tokens [start, end)."""

    request: Request
    start: int
    end: int
    samples: bool
    is_chunk: bool


@dataclass(slots=True)
class Step:
    """A launched step, as the host remembers it. `span_owners` runs parallel to the plan's spans;
    `page_sets` (checks only) holds the pages each entry may touch."""

    plan: StepPlan
    entries: list[Entry]
    span_owners: list[Request]
    launched_at: float = 0.0
    page_sets: list[np.ndarray] = field(default_factory=list)
    handle: StepHandle | None = None


def build_step(decision: Decision, step_id: int, life: Lifecycle) -> Step:
    """Admits, takes pages, and moves every request in `decision` past this step."""
    entries, new_rows = _entries(decision, life)
    _take_pages(entries, life)
    spans: list[LogprobSpan] = []
    owners: list[Request] = []
    prompts: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    num_decode = len(decision.decode)
    sources.append(np.array([e.request.row for e in entries[:num_decode]], np.int32))
    for index in range(num_decode, len(entries)):
        entry = entries[index]
        prompts.append(entry.request.ids[entry.start : entry.end])
        sources.append(np.full(entry.end - entry.start, FROM_PROMPT, np.int32))
        added = _logprob_spans(entry, index)
        spans += added
        owners += [entry.request] * len(added)
    page_rows, page_index, page_ids = life.table.take_changes()
    plan = StepPlan(
        step_id=step_id,
        num_decode=num_decode,
        rows=np.array([e.request.row for e in entries], np.int32),
        query_len=np.array([e.end - e.start for e in entries], np.int32),
        kv_len=np.array([e.end for e in entries], np.int32),
        input_ids=np.concatenate(prompts) if prompts else np.zeros(0, np.int32),
        source=np.concatenate(sources),
        page_rows=page_rows,
        page_index=page_index,
        page_ids=page_ids,
        sample_index=np.array([i for i, e in enumerate(entries) if e.samples], np.int32),
        new_rows=new_rows,
        logprob_spans=spans,
    )
    for entry in entries:
        _advance(entry, step_id)
    return Step(plan, entries, owners)


def _entries(decision: Decision, life: Lifecycle) -> tuple[list[Entry], list[RowSampling]]:
    """Decode rows first, then chunks; rows are taken and prefixes locked here."""
    entries = [Entry(r, r.computed_len, r.computed_len + 1, samples=True, is_chunk=False) for r in decision.decode]
    new_rows: list[RowSampling] = []
    for chunk in decision.chunks:
        request = chunk.request
        if chunk.match is not None:
            life.waiting.remove(request)
            life.admit(request, chunk.match)
            new_rows.append(_row_sampling(request))
        start, end = request.computed_len, request.computed_len + chunk.length
        samples = end == request.total_len < request.max_total_len
        entries.append(Entry(request, start, end, samples, is_chunk=True))
    return entries, new_rows


def _take_pages(entries: list[Entry], life: Lifecycle) -> None:
    """One allocation for the whole step: every request holds just the pages of its tokens."""
    needs = [life.allocator.pages_for(e.end) - e.request.num_pages for e in entries]
    pages = life.take_pages(sum(needs))
    at = 0
    for entry, need in zip(entries, needs, strict=True):
        if need:
            life.grow(entry.request, pages[at : at + need])
            at += need


def _advance(entry: Entry, step_id: int) -> None:
    request = entry.request
    request.computed_len = entry.end
    request.last_step = step_id
    if entry.samples:
        request.total_len += 1
        if request.state is State.PREFILL:
            request.move(State.DECODE)
    elif request.computed_len == request.max_total_len:
        request.move(State.DECODE)  # nothing to sample: only its result is awaited


def _row_sampling(request: Request) -> RowSampling:
    params = request.params
    seed = request.seed
    masked = params.min_new_tokens > 0
    penalties = params.has_penalties
    return RowSampling(
        row=request.row,
        seed=seed - (1 << 64) if seed >> 63 else seed,
        params=params,
        min_end=request.prompt_len + params.min_new_tokens if masked else 0,
        stop_ids=sorted(request.stop_ids) if masked else [],
        prompt_ids=pack_ids(request.ids[: request.prompt_len]) if penalties else b"",
        output_ids=pack_ids(request.ids[request.prompt_len :]) if penalties else b"",
        return_logprob=request.source.return_logprob,
        top_logprobs=request.source.top_logprobs,
    )


def _logprob_spans(entry: Entry, index: int) -> list[LogprobSpan]:
    """Row j of a chunk scores position start + j + 1, so the chunk's last row scores the first
    token of the next chunk; the row that samples scores nothing."""
    request = entry.request
    first = max(entry.start + 1, request.logprob_next)
    last = min(entry.end, request.prompt_len - 1)
    spans = []
    for at in range(first, last + 1, LOGPROB_BLOCK):
        targets = request.ids[at : min(at + LOGPROB_BLOCK, last + 1)]
        span = LogprobSpan(index, at - 1 - entry.start, pack_ids(targets), request.source.top_logprobs)
        spans.append(span)
    request.logprob_next = max(request.logprob_next, last + 1)
    return spans
