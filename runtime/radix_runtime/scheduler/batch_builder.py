"""From a Decision to the StepPlan, taking rows and pages on the way."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from ..memory.request_table import RequestTable
from ..messages import pack_ids
from ..step_plan import LOGPROB_ROWS, LogprobSpan, RowSampling, StepPlan, StepResult
from .lifecycle import Lifecycle
from .policy import Decision, Entry
from .request import Request, State


@dataclass(slots=True)
class Step:
    """A launched step, as the host remembers it. `launched_at` is clock time in seconds."""

    plan: StepPlan
    entries: list[Entry]
    launched_at: float
    handle: Future[StepResult]
    page_sets: list[np.ndarray] = field(default_factory=list)  # see `remember_pages`

    def remember_pages(self, table: RequestTable) -> None:
        """For the invariants: the pages that each entry may touch, however its request changes
        later."""
        for entry in self.entries:
            request = entry.request
            self.page_sets.append(table.pages(request.row, request.num_pages).copy())


def build_step(decision: Decision, step_id: int, life: Lifecycle) -> tuple[StepPlan, list[Entry]]:
    """Admits, takes pages, and moves every request in `decision` past this step."""
    entries = [*decision.decode, *decision.chunks]
    new_rows = _admit(entries, life)
    _take_pages(entries, life)
    num_decode = len(decision.decode)
    prompts = [entry.request.ids[entry.start : entry.end] for entry in decision.chunks]
    input_ids = np.concatenate([np.zeros(0, np.int32), *prompts])
    spans: list[LogprobSpan] = []
    for index, entry in enumerate(decision.chunks, num_decode):
        spans += _logprob_spans(entry, index)
    page_rows, page_index, page_ids = life.table.take_changes()
    plan = StepPlan(
        step_id=step_id,
        num_decode=num_decode,
        rows=np.array([entry.request.row for entry in entries], np.int32),
        query_len=np.array([entry.end - entry.start for entry in entries], np.int32),
        kv_len=np.array([entry.end for entry in entries], np.int32),
        num_samples=np.array([entry.num_samples for entry in entries], np.int32),
        input_ids=input_ids,
        page_rows=page_rows,
        page_index=page_index,
        page_ids=page_ids,
        new_rows=new_rows,
        logprob_spans=spans,
    )
    for entry in entries:
        _advance(entry, step_id)
    return plan, entries


def _admit(entries: list[Entry], life: Lifecycle) -> list[RowSampling]:
    """Gives new requests their row and locks their prefixes, before anything is evicted."""
    new_rows = []
    for entry in entries:
        if entry.match is not None:
            life.admit(entry.request, entry.match)
            new_rows.append(_row_sampling(entry.request))
    return new_rows


def _take_pages(entries: list[Entry], life: Lifecycle) -> None:
    """One allocation for the whole step: every request gets just the pages that its entry may
    fill. Those that rejected drafts left over serve its next tokens."""
    needs = [max(0, life.allocator.pages_for(e.end) - e.request.num_pages) for e in entries]
    pages = life.take_pages(sum(needs))
    start = 0
    for entry, need in zip(entries, needs, strict=True):
        life.grow(entry.request, pages[start : start + need])
        start += need


def _advance(entry: Entry, step_id: int) -> None:
    request = entry.request
    request.computed_len = entry.end
    request.reserved_len = max(request.reserved_len, entry.end)
    request.last_step = step_id
    request.total_len += entry.num_samples
    # With nothing to sample only the result is awaited.
    prompt_done = entry.num_samples > 0 or entry.end == request.max_total_len
    if entry.is_chunk and prompt_done:
        request.move(State.DECODE)


def _row_sampling(request: Request) -> RowSampling:
    params = request.params
    seed = request.seed
    state = RowSampling(
        row=request.row,
        seed=seed - (1 << 64) if seed >> 63 else seed,
        params=params,
        min_end=request.prompt_len + params.min_new_tokens,
        return_logprob=request.source.return_logprob,
        top_logprobs=request.source.top_logprobs,
    )
    if params.min_new_tokens:
        state.stop_ids = sorted(request.stop_ids)
    if params.has_penalties:
        state.prompt_ids = pack_ids(request.ids[: request.prompt_len])
        state.output_ids = pack_ids(request.ids[request.prompt_len :])
    return state


def _logprob_spans(entry: Entry, index: int) -> Iterator[LogprobSpan]:
    """The prompt tokens that chunk `index` of the step scores. Row j of a chunk scores position
    start + j + 1, so its last row the first token of the next chunk; the row that samples scores
    nothing."""
    request = entry.request
    start = max(entry.start + 1, request.logprob_next)
    end = min(entry.end, request.prompt_len - 1) + 1
    for position in range(start, end, LOGPROB_ROWS):
        targets = request.ids[position : min(position + LOGPROB_ROWS, end)]
        yield LogprobSpan(
            index=index,
            first=position - 1 - entry.start,
            targets=pack_ids(targets),
            top_n=request.source.top_logprobs,
        )
    request.logprob_next = max(request.logprob_next, end)
