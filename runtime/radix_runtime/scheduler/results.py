"""What a completed step means: tokens accepted, prefixes shared, requests finished."""

import numpy as np

from ..errors import RequestError, require
from ..messages import FinishReason, unpack_ids
from ..step_plan import StepResult
from .batch_builder import Step
from .decision import Entry
from .figures import Counters
from .lifecycle import Lifecycle
from .live import LiveRequests
from .logprobs import LogprobBuffer
from .output import Output
from .request import Request


class Results:
    """Takes the steps' results in the order of their launch."""

    def __init__(
        self,
        *,
        life: Lifecycle,
        live: LiveRequests,
        output: Output,
        counters: Counters,
        vocab_size: int,
    ) -> None:
        self._life = life
        self._live = live
        self._output = output
        self._counters = counters
        self._vocab_size = vocab_size

    def complete(self, step: Step, result: StepResult) -> None:
        """Hands out the tokens of `step`, lets full pages of its prompts enter the tree, and gives
        back what it was the last to use. Raises InvariantViolation (I7) for a result that does not
        fit the step."""
        plan = step.plan
        num_samples = plan.num_samples[plan.num_samples > 0]
        fits = (
            result.step_id == plan.step_id
            and len(result.ids) == num_samples.sum()
            and len(result.counts) == len(num_samples)
            and bool((result.counts >= 1).all() and (result.counts <= num_samples).all())
        )
        require(fits, "I7", f"result of step {plan.step_id} does not fit it")
        self._life.completed_step = plan.step_id
        for span, values in zip(plan.logprob_spans, result.prompt_logprobs, strict=True):
            buffer = step.entries[span.index].request.prompt_logprobs
            assert buffer is not None
            buffer.add(unpack_ids(span.targets), *values)
        if plan.snapshots:
            self._settle_snapshots(step, result)
        ids = result.ids.tolist()
        counts = iter(result.counts.tolist())
        slot = 0
        for entry in step.entries:
            count = next(counts) if entry.num_samples else 0
            tokens = ids[slot : slot + count]
            if entry.request.ended:
                self._counters.dropped_tokens_total += count
            elif -1 in tokens:
                self._fail_numerically(entry.request)
            else:
                self._accept(entry, tokens, result, slot)
            slot += entry.num_samples
        self._life.reclaim()

    def _accept(self, entry: Entry, tokens: list[int], result: StepResult, slot: int) -> None:
        """`tokens` are those of the entry's samples that count; they start at `slot` of the
        result."""
        request = entry.request
        rejected = entry.num_samples - len(tokens)
        request.total_len -= rejected
        request.computed_len -= rejected
        if entry.is_chunk:
            self._life.share(request, entry.end)
        if self._life.groups:
            self._life.trim(request, _committed(entry, len(tokens)))
        if entry.num_samples == 0 and entry.end < request.max_total_len:
            return  # a chunk in the middle of its prompt
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
        counts = iter(result.counts.tolist())
        for entry in step.entries:
            count = next(counts) if entry.num_samples else 0
            if not entry.request.ended:
                committed[entry.request.row] = _committed(entry, count)
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


def _committed(entry: Entry, count: int) -> int:
    """Tokens of the request that are computed for good once `count` of the entry's samples are
    accepted, before they are appended."""
    if entry.is_chunk:
        return entry.end
    return entry.request.num_ids - 1 + count


def finish_reason(request: Request, token: int) -> FinishReason | None:
    """Why the request ends with `token`, its newest; None: it goes on."""
    if token in request.stop_ids and request.num_output > request.params.min_new_tokens:
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
