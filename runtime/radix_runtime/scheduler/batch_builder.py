"""From a Decision to the StepPlan, taking rows and pages on the way."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from ..messages import pack_ids
from ..step_plan import LOGPROB_ROWS, LogprobSpan, RowSampling, StepPlan, StepResult
from .lifecycle import Lifecycle
from .policy import Decision, Entry
from .request import Request, State


@dataclass(slots=True)
class Step:
    """A launched step, as the host remembers it. `page_sets` (checks only): the pages each entry
    may touch."""

    plan: StepPlan
    entries: list[Entry]
    page_sets: list[np.ndarray]
    launched_at: float
    handle: Future[StepResult]


def build_step(decision: Decision, step_id: int, life: Lifecycle) -> tuple[StepPlan, list[Entry]]:
    """Admits, takes pages, and moves every request in `decision` past this step."""
    entries = [*decision.decode, *decision.chunks]
    new_rows: list[RowSampling] = []
    for request, *_, match in entries:
        if match is not None:
            life.admit(request, match)
            new_rows.append(_row_sampling(request))
    # One allocation for the whole step: every request holds just the pages of its tokens.
    needs = [life.allocator.pages_for(e.end) - e.request.num_pages for e in entries]
    pages, at = life.take_pages(sum(needs)), 0
    for entry, need in zip(entries, needs, strict=True):
        life.grow(entry.request, pages[at : at + need])
        at += need
    num_decode = len(decision.decode)
    rows = np.array([e.request.row for e in entries], np.int32)
    prompts = [e.request.ids[e.start : e.end] for e in entries[num_decode:]]
    input_ids = np.concatenate([np.zeros(0, np.int32), *prompts])
    kv_len = np.array([e.end for e in entries], np.int32)
    query_len = kv_len - np.array([e.start for e in entries], np.int32)
    num_samples = np.array([1 if e.samples else 0 for e in entries], np.int32)
    spans = [span for i, e in enumerate(entries) if e.is_chunk for span in _logprob_spans(e, i)]
    page_rows, page_index, page_ids = life.table.take_changes()
    plan = StepPlan(
        step_id=step_id,
        num_decode=num_decode,
        rows=rows,
        query_len=query_len,
        kv_len=kv_len,
        num_samples=num_samples,
        input_ids=input_ids,
        page_rows=page_rows,
        page_index=page_index,
        page_ids=page_ids,
        new_rows=new_rows,
        logprob_spans=spans,
    )
    for entry in entries:
        request = entry.request
        request.computed_len, request.last_step = entry.end, step_id
        request.total_len += entry.samples
        # With nothing to sample only the result is awaited.
        if entry.is_chunk and (entry.samples or entry.end == request.max_total_len):
            request.move(State.DECODE)
    return plan, entries


def _row_sampling(request: Request) -> RowSampling:
    params, seed, source = request.params, request.seed, request.source
    signed = seed - (1 << 64) if seed >> 63 else seed
    state = RowSampling(request.row, signed, params, request.prompt_len + params.min_new_tokens)
    state.stop_ids = sorted(request.stop_ids) if params.min_new_tokens else []
    if params.has_penalties:
        state.prompt_ids, state.output_ids = map(
            pack_ids, np.split(request.ids, [request.prompt_len])
        )
    state.return_logprob, state.top_logprobs = source.return_logprob, source.top_logprobs
    return state


# Row j of a chunk scores position start + j + 1, also in the next chunk; the row that samples
# scores nothing.
def _logprob_spans(entry: Entry, index: int) -> Iterator[LogprobSpan]:
    request, start = entry.request, max(entry.start + 1, entry.request.logprob_next)
    end = min(entry.end, request.prompt_len - 1) + 1
    for at in range(start, end, LOGPROB_ROWS):
        targets = request.ids[at : min(at + LOGPROB_ROWS, end)]
        yield LogprobSpan(
            index, at - 1 - entry.start, pack_ids(targets), request.source.top_logprobs
        )
    request.logprob_next = max(request.logprob_next, end)
