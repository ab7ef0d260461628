"""From a Decision to the StepPlan, taking rows and pages on the way."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

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
from .decision import Decision, DecodeEntries, Entry
from .lifecycle import Lifecycle
from .request import Request
from .rows import Rows

_NO_IDS = np.zeros(0, np.int32)


@dataclass(slots=True)
class Step:
    """A launched step, as the host remembers it: its streams, then its chunks. Times are the
    clock's, in seconds: the host began to plan it, gave it to the engine, which had taken it."""

    plan: StepPlan
    streams: DecodeEntries
    chunks: list[Entry]
    planned_at: float
    launched_at: float
    queued_at: float
    handle: Future[StepResult]
    page_sets: list[np.ndarray] = field(default_factory=list)  # see `remember_pages`

    def requests(self, rows: Rows) -> list[Request]:
        """Of its entries, in their order: until the step has completed nobody else gets a row."""
        return [rows.request(row) for row in self.plan.rows.tolist()]

    def remember_pages(self, life: Lifecycle) -> None:
        """For the invariants: the pages that each entry may touch, however its request changes
        later."""
        for request in self.requests(life.rows):
            self.page_sets.append(life.table.pages(request.row, request.num_pages).copy())


def build_step(decision: Decision, step_id: int, life: Lifecycle) -> StepPlan:
    """Admits, takes pages, and moves every request in `decision` past this step."""
    streams = decision.decode
    chunks = decision.chunks
    new_rows = _admit(chunks, life)
    rows = streams.rows
    ends = streams.start + streams.num_samples
    num_samples = streams.num_samples
    query_len = num_samples
    if chunks:
        rows = _with(rows, [entry.request.row for entry in chunks])
        ends = _with(ends, [entry.end for entry in chunks])
        num_samples = _with(num_samples, [entry.num_samples for entry in chunks])
        query_len = _with(query_len, [entry.end - entry.start for entry in chunks])
    _take_pages(rows, ends, life)
    page_rows, page_index, page_ids = life.table.take_changes()
    plan = StepPlan(
        step_id=step_id,
        num_decode=len(streams),
        rows=rows.astype(np.int32),
        query_len=query_len.astype(np.int32),
        kv_len=ends.astype(np.int32),
        num_samples=num_samples.astype(np.int32),
        input_ids=_NO_IDS,
        page_rows=page_rows,
        page_index=page_index,
        page_ids=page_ids,
        new_rows=new_rows,
    )
    if chunks:
        _plan_chunks(plan, chunks)
    if life.groups or life.host is not None:
        _plan_groups(plan, decision, life)
    _advance(rows, ends, num_samples, step_id, life)
    for entry in chunks:
        # With nothing to sample only the result is awaited.
        if entry.num_samples > 0 or entry.end == entry.request.max_total_len:
            life.start_decoding(entry.request)
    return plan


def _with(streams: np.ndarray, chunks: list[int]) -> np.ndarray:
    return np.append(streams, np.array(chunks, np.int64))


def _plan_chunks(plan: StepPlan, chunks: list[Entry]) -> None:
    """The ids of the prompts, and which of them are scored."""
    prompts = [entry.request.ids[entry.start : entry.end] for entry in chunks]
    plan.input_ids = np.concatenate(prompts)
    for index, entry in enumerate(chunks, plan.num_decode):
        plan.logprob_spans += _logprob_spans(entry, index)


def _plan_groups(plan: StepPlan, decision: Decision, life: Lifecycle) -> None:
    """What the plan says of cached state beside the full pages, and of the host tier."""
    for window in life.windows:
        rows, index, ids = window.table.take_changes()
        plan.window_pages.append(PageDeltas(rows=rows, index=index, ids=ids))
    borders = _snapshot_borders(decision, life.page_size) if life.snapshots else []
    for group in life.snapshots:
        number = group.pool.index + 1
        for row, slot, position in group.take_restores():
            restore = SnapshotCopy(group=number, row=row, slot=slot, position=position)
            plan.restores.append(restore)
        for row, border in borders:
            free = group.plan()
            if free is not None:
                snapshot = SnapshotCopy(group=number, row=row, slot=free, position=border)
                plan.snapshots.append(snapshot)
    if life.host is not None:
        plan.copy_source, plan.copy_target, plan.copy_to_host = life.host.take_copies()


def _snapshot_borders(decision: Decision, page_size: int) -> list[tuple[int, int]]:
    """(row, page border within its entry) after which a snapshot of the row's state is worth most:
    of a chunk the last one from which a prompt can go on, of a stream the next one."""
    streams = decision.decode
    next_border = (streams.start // page_size + 1) * page_size
    reached = next_border <= streams.start + streams.num_samples
    borders = list(zip(streams.rows[reached].tolist(), next_border[reached].tolist(), strict=True))
    for entry in decision.chunks:
        ends_prompt = entry.end == entry.request.total_len
        # The last two tokens of a prompt are always computed (Request.match_limit).
        border = (entry.end - 2 if ends_prompt else entry.end) // page_size * page_size
        if border > entry.start:
            borders.append((entry.request.row, border))
    return borders


def _admit(chunks: list[Entry], life: Lifecycle) -> list[RowSampling]:
    """Gives new requests their row and locks their prefixes, before anything is evicted; then
    brings back what of them is on the host."""
    new_rows = []
    for entry in chunks:
        if entry.match is not None:
            life.admit(entry.request, entry.match)
            new_rows.append(_row_sampling(entry.request))
    for entry in chunks:
        if entry.match is not None and entry.request.num_pages < entry.match.num_pages:
            life.load(entry.request)
    return new_rows


def _take_pages(rows: np.ndarray, ends: np.ndarray, life: Lifecycle) -> None:
    """One allocation for the whole step: every row gets just the pages that its entry may fill.
    Those that rejected drafts left over serve its next tokens."""
    short = ends > life.rows.num_pages[rows] * life.page_size
    if np.count_nonzero(short):
        rows = rows[short]
        needs = -(-ends[short] // life.page_size) - life.rows.num_pages[rows]
        life.extend(rows, needs)


def _advance(
    rows: np.ndarray, ends: np.ndarray, num_samples: np.ndarray, step_id: int, life: Lifecycle
) -> None:
    numbers = life.rows
    numbers.computed_len[rows] = ends
    numbers.reserved_len[rows] = np.maximum(numbers.reserved_len[rows], ends)
    numbers.last_step[rows] = step_id
    numbers.total_len[rows] += num_samples


def _row_sampling(request: Request) -> RowSampling:
    params = request.params
    seed = request.seed
    state = RowSampling(
        row=request.row,
        seed=seed - (1 << 64) if seed >> 63 else seed,
        params=params,
        min_end=request.prompt_len + request.held_back,
        return_logprob=request.source.return_logprob,
        top_logprobs=request.source.top_logprobs,
    )
    if request.held_back:
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
            top_n=request.source.prompt_top,
            ranks=request.source.prompt_logprobs is not None,
        )
    request.logprob_next = max(request.logprob_next, end)
