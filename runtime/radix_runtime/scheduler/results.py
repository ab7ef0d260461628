"""What a completed step means: tokens accepted, prefixes shared, requests finished."""

import numpy as np

from ..errors import RequestError, require
from ..messages import FinishReason, unpack_ids
from ..step_plan import StepResult
from .batch_builder import Step
from .decision import DecodeEntries, Entry
from .figures import Counters
from .lifecycle import Lifecycle
from .live import LiveRequests
from .logprobs import LogprobBuffer
from .output import Output
from .request import Request
from .rows import Flag


class Results:
    """Takes the steps' results in the order of their launch."""

    def __init__(
        self,
        *,
        life: Lifecycle,
        live: LiveRequests,
        output: Output,
        counters: Counters,
    ) -> None:
        self._life = life
        self._live = live
        self._output = output
        self._counters = counters
        self._vocab_size = live.stop_ids.vocab_size

    def complete(self, step: Step, result: StepResult) -> None:
        """Hands out the tokens of `step`, lets full pages of its prompts enter the tree, and gives
        back what it was the last to use. Raises InvariantViolation (I7) for a result that does not
        fit the step."""
        plan = step.plan
        _require_fit(step, result)
        self._life.completed_step = plan.step_id
        for span, values in zip(plan.logprob_spans, result.prompt_logprobs, strict=True):
            buffer = step.chunks[span.index - plan.num_decode].request.prompt_logprobs
            assert buffer is not None
            buffer.add(unpack_ids(span.targets), *values)
        if plan.snapshots:
            self._settle_snapshots(step, result)
        self._complete_streams(step, result)
        slot = step.streams.total_samples
        for entry in step.chunks:
            self._complete_chunk(entry, result, slot)
            slot += entry.num_samples
        self._life.reclaim()

    # Streams ------------------------------------------------------------------------------

    def _complete_streams(self, step: Step, result: StepResult) -> None:
        """Rows to which nothing happens but a token or some get them all at once, the others one
        after the other."""
        streams = step.streams
        if len(streams) == 0:
            return
        counts = streams.num_samples
        tokens = result.ids[: streams.total_samples]
        slots = None
        if streams.total_samples > len(streams):
            counts = result.counts[: len(streams)].astype(np.int64)
            tokens = tokens[_first_of_each(streams.num_samples, counts)]
        if result.late is not None and np.count_nonzero(result.late):
            has_drawn = ~result.late[: len(streams)]
            self._take_back(streams.rows[~has_drawn])
            slots = _starts(streams.num_samples)[has_drawn]
            tokens = tokens[np.repeat(has_drawn, counts)]
            counts = counts[has_drawn]
            streams = streams.where(has_drawn)
        alone = self._need_attention(streams.rows, counts, tokens)
        if np.count_nonzero(alone) == 0:
            self._accept_all(streams, counts, tokens)
            return
        rest = ~alone
        self._accept_all(streams.where(rest), counts[rest], tokens[np.repeat(rest, counts)])
        # The requests of all rows first: one that ends may take others along, rows and all.
        requests = [self._life.rows.request(row) for row in streams.rows[alone].tolist()]
        if slots is None:
            slots = _starts(streams.num_samples)
        for index, request in zip(np.flatnonzero(alone).tolist(), requests, strict=True):
            slot = int(slots[index])
            taken = result.ids[slot : slot + int(counts[index])].tolist()
            rejected = int(streams.num_samples[index]) - len(taken)
            self._complete_stream(request, taken, rejected, result, slot)

    def _take_back(self, rows: np.ndarray) -> None:
        """These rows have drawn nothing, as their masks were late: they are a token shorter than
        was expected. The next step has their last token once more, as has one in flight."""
        numbers = self._life.rows
        self._counters.late_masks_total += len(rows)
        rows = rows[(numbers.flags[rows] & Flag.ENDED) == 0]
        numbers.total_len[rows] -= 1
        numbers.computed_len[rows] -= 1

    def _need_attention(
        self, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        """bool [n]: rows that have ended or end with their next `counts[i]` of `tokens`, whose
        tokens are void, or whose tokens need more than to be appended and sent."""
        numbers = self._life.rows
        alone: np.ndarray = numbers.num_ids[rows] + counts >= numbers.max_total_len[rows]
        flags = numbers.flags[rows]
        if np.count_nonzero(flags):
            alone |= (flags & (Flag.ENDED | Flag.BY_TOKEN)) > 0
        if self._life.groups:
            alone[:] = True
        special = self._live.stop_ids.among(tokens)
        if np.count_nonzero(special):
            owners = np.repeat(np.arange(len(rows)), counts)
            for index in np.flatnonzero(special).tolist():
                owner = owners[index]
                token = int(tokens[index])
                stop_ids = numbers.request(rows[owner]).stop_ids
                if token in stop_ids or not 0 <= token < self._vocab_size:
                    alone[owner] = True
        return alone

    def _accept_all(self, streams: DecodeEntries, counts: np.ndarray, tokens: np.ndarray) -> None:
        """The rows of `streams` get `counts[i]` of `tokens`, and go on."""
        numbers = self._life.rows
        rows = streams.rows
        if len(tokens) < streams.total_samples:
            rejected = streams.num_samples - counts
            numbers.total_len[rows] -= rejected
            numbers.computed_len[rows] -= rejected
        numbers.append(rows, counts, tokens)
        counted = len(tokens)
        flags = numbers.flags[rows]
        if np.count_nonzero(flags):
            counted -= int(counts[(flags & Flag.COUNTED_LATE) > 0].sum())
        self._counters.generation_tokens_total += counted
        self._output.add_rows(rows, counts, tokens)

    def _complete_stream(
        self, request: Request, tokens: list[int], rejected: int, result: StepResult, slot: int
    ) -> None:
        """`tokens` are the accepted ones of the request, from `slot` of the result on."""
        if request.ended:
            self._counters.dropped_tokens_total += len(tokens)
        elif -1 in tokens:
            self._fail_numerically(request)
        else:
            request.total_len -= rejected
            request.computed_len -= rejected
            if self._life.groups:
                self._life.trim(request, request.num_ids - 1 + len(tokens))
            self._accept(request, tokens, result, slot)

    # Chunks -------------------------------------------------------------------------------

    def _complete_chunk(self, entry: Entry, result: StepResult, slot: int) -> None:
        """Its sample, if it has one, is in `slot` of the result."""
        request = entry.request
        tokens = result.ids[slot : slot + entry.num_samples].tolist()
        if request.ended:
            self._counters.dropped_tokens_total += len(tokens)
        elif -1 in tokens:
            self._fail_numerically(request)
        else:
            self._life.share(request, entry.end)
            if self._life.groups:
                self._life.trim(request, entry.end)
            if tokens or entry.end == request.max_total_len:  # not in the middle of a prompt
                self._accept(request, tokens, result, slot)

    # One request --------------------------------------------------------------------------

    def _accept(self, request: Request, tokens: list[int], result: StepResult, slot: int) -> None:
        reason = self._append(request, tokens, result, slot)
        if reason is not None:
            self._live.finish(request, reason)
        else:
            self._output.add(request, None)

    def _append(
        self, request: Request, tokens: list[int], result: StepResult, slot: int
    ) -> FinishReason | None:
        """The request gets the tokens up to the one that ends it, and why that one does. The rest
        is dropped, as `complete` drops what a request gets that has ended: nowhere else are tokens
        dropped."""
        # Without a token to come the prompt is all that was asked for.
        reason = None if tokens else FinishReason("length")
        appended = 0
        for token in tokens:
            in_vocabulary = 0 <= token < self._vocab_size
            require(in_vocabulary, "I7", f"sampled id {token} of {request.rid}")
            request.append(token)
            if request.logprobs is not None:
                record_logprobs(request.logprobs, token, result, slot + appended)
            appended += 1
            reason = finish_reason(request, token)
            if reason is not None:
                break
        self._counters.dropped_tokens_total += len(tokens) - appended
        if not request.params.stop:  # otherwise at the end: some may not count
            self._counters.generation_tokens_total += appended
        return reason

    def _settle_snapshots(self, step: Step, result: StepResult) -> None:
        """Before any request of the step ends: those whose position was reached are kept."""
        committed: dict[int, int] = {}  # of the rows whose requests go on
        rows = step.streams.rows.tolist()
        counts = result.counts[: len(rows)].copy()
        if result.late is not None:
            counts[result.late[: len(rows)]] = 0
        for row, count in zip(rows, counts.tolist(), strict=True):
            request = self._life.rows.request(row)
            if not request.ended:
                committed[row] = request.num_ids - 1 + count
        for entry in step.chunks:
            if not entry.request.ended:
                committed[entry.request.row] = entry.end
        groups = {group.pool.index + 1: group for group in self._life.snapshots}
        for copy in step.plan.snapshots:
            taken = copy.position <= committed.get(copy.row, -1)
            groups[copy.group].settle(copy.row, copy.position, copy.slot, taken)

    def _fail_numerically(self, request: Request) -> None:
        for choice in self._live[request.rid]:
            choice.poisoned = True
        error = RequestError(
            status=500, code="numerical_error", message="the model gave no finite logits"
        )
        self._live.fail(request.rid, error)


def _require_fit(step: Step, result: StepResult) -> None:
    plan = step.plan
    num_samples = plan.num_samples
    if step.chunks:
        num_samples = num_samples[num_samples > 0]
    total = step.streams.total_samples + sum(entry.num_samples for entry in step.chunks)
    fits = (
        result.step_id == plan.step_id
        and len(result.ids) == total
        and len(result.counts) == len(num_samples)
        and _accepts(result.counts, num_samples)
        and _may_be_late(result.late, step)
    )
    require(fits, "I7", f"result of step {plan.step_id} does not fit it")


def _accepts(counts: np.ndarray, num_samples: np.ndarray) -> bool:
    """Whether 1 .. `num_samples[i]` samples are accepted of each entry."""
    if counts.tobytes() == num_samples.tobytes():
        return True  # mostly all of them, which takes no time to see
    within = (counts >= 1) & (counts <= num_samples)
    return np.count_nonzero(within) == len(counts)


def _may_be_late(late: np.ndarray | None, step: Step) -> bool:
    """Whether only streams are late that sample one token."""
    if late is None:
        return True
    streams = late[: len(step.streams)]
    return not late[len(streams) :].any() and bool((step.streams.num_samples[streams] == 1).all())


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Where each of consecutive runs of these sizes begins."""
    starts: np.ndarray = sizes.cumsum() - sizes
    return starts


def _first_of_each(sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """bool [sum of sizes]: the first `counts[i]` of run i, which has `sizes[i]` elements."""
    ends = sizes.cumsum()
    place = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    return place < np.repeat(counts, sizes)


def finish_reason(request: Request, token: int) -> FinishReason | None:
    """Why the request ends with `token`, its newest; None: it goes on."""
    if token in request.stop_ids and request.num_output > request.held_back:
        return FinishReason("stop", matched=token)
    if request.num_ids >= request.max_total_len:
        return FinishReason("length")
    return None


def record_logprobs(buffer: LogprobBuffer, token: int, result: StepResult, slot: int) -> None:
    """`token` is sample `slot` of the step."""
    assert result.logprobs is not None
    one = slice(slot, slot + 1)
    buffer.add(
        np.array([token]),
        result.logprobs[one],
        None if result.top_ids is None else result.top_ids[one],
        None if result.top_logprobs is None else result.top_logprobs[one],
    )
