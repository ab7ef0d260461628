"""From a Decision to the StepPlan, taking rows and pages on the way."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from ..memory.request_table import RequestTable
from ..messages import pack_ids
from ..step_plan import (
    LOGPROB_ROWS,
    LogprobSpan,
    PageDeltas,
    RowSampling,
    SnapshotCopy,
    StepPlan,
    StepResult,
)
from .decision import Decision, Entry
from .lifecycle import Lifecycle
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
    entries = decision.entries
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
    if life.groups or life.host is not None:
        _plan_groups(plan, entries, life)
    for entry in entries:
        _advance(entry, step_id)
    return plan, entries


def _plan_groups(plan: StepPlan, entries: list[Entry], life: Lifecycle) -> None:
    """What the plan says of cached state beside the full pages, and of the host tier."""
    for window in life.windows:
        rows, index, ids = window.table.take_changes()
        plan.window_pages.append(PageDeltas(rows=rows, index=index, ids=ids))
    for group in life.snapshots:
        number = group.pool.index + 1
        for row, slot, position in group.take_restores():
            restore = SnapshotCopy(group=number, row=row, slot=slot, position=position)
            plan.restores.append(restore)
        for entry in entries:
            border = _snapshot_position(entry, life.page_size)
            free = group.plan() if border is not None else None
            if border is not None and free is not None:
                row = entry.request.row
                snapshot = SnapshotCopy(group=number, row=row, slot=free, position=border)
                plan.snapshots.append(snapshot)
    if life.host is not None:
        plan.copy_source, plan.copy_target, plan.copy_to_host = life.host.take_copies()


def _snapshot_position(entry: Entry, page_size: int) -> int | None:
    """The page border within the entry after which a snapshot of the row's state is worth most:
    of a chunk the last one from which a prompt can go on, of a stream the next one."""
    if not entry.is_chunk:
        border = (entry.start // page_size + 1) * page_size
        return border if border <= entry.end else None
    ends_prompt = entry.end == entry.request.total_len
    # The last two tokens of a prompt are always computed (Request.match_limit).
    border = (entry.end - 2 if ends_prompt else entry.end) // page_size * page_size
    return border if border > entry.start else None


def _admit(entries: list[Entry], life: Lifecycle) -> list[RowSampling]:
    """Gives new requests their row and locks their prefixes, before anything is evicted; then
    brings back what of them is on the host."""
    new_rows = []
    for entry in entries:
        if entry.match is not None:
            life.admit(entry.request, entry.match)
            new_rows.append(_row_sampling(entry.request))
    for entry in entries:
        if entry.match is not None and entry.request.num_pages < entry.match.num_pages:
            life.load(entry.request)
    return new_rows


def _take_pages(entries: list[Entry], life: Lifecycle) -> None:
    """One allocation for the whole step: every request gets just the pages that its entry may
    fill. Those that rejected drafts left over serve its next tokens."""
    needs = [max(0, life.allocator.pages_for(e.end) - e.request.num_pages) for e in entries]
    life.extend([entry.request for entry in entries], needs)


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
