"""The loop of rank 0: messages in, steps out, tokens to the clients.

One iteration takes in messages, launches the next step and then finishes the step before it. With
overlap the step just launched keeps running while the host finishes its predecessor and plans its
successor; without, a step is finished as soon as it is launched. That is the only difference: how
many steps may be in flight when an iteration ends.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from ..config import ServerArgs
from ..errors import InvariantViolation, RequestError
from ..memory.page_allocator import PageAllocator
from ..memory.radix_cache import RadixCache
from ..memory.request_table import RequestTable
from ..messages import (
    Abort,
    Control,
    ControlReply,
    FinishReason,
    Generate,
    Message,
    RequestFailed,
    TextStop,
    unpack_ids,
)
from ..step_plan import Executor, StepResult
from . import invariants
from .batch_builder import Entry, Step, build_step
from .channel import Inbox, Outbox
from .counters import Counters
from .intake import Intake
from .lifecycle import Lifecycle
from .output import Output, finish_reason, record_logprobs
from .policy import Decision, OutputRatio, QueueContext, View, plan_step, schedule_policies
from .request import Request, State

IDLE_WAIT = 1.0  # seconds between heartbeats when there is nothing to do
IDLE_CHECK_AFTER = 0.1  # seconds of idleness before the runtime checks itself


class Scheduler:
    """`step()` is the whole machine; `run()` repeats it and sleeps when there is nothing to do."""

    def __init__(
        self,
        args: ServerArgs,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        *,
        eos_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self.args = args
        self.executor = executor
        self.inbox = inbox
        self.outbox = outbox
        self.clock = clock
        self.heartbeat = heartbeat
        self.intake = Intake(executor, eos_ids, args.max_choices)
        self.life = _build_lifecycle(args, executor)
        self.output = Output(outbox)
        self.counters = Counters()
        self.ratio = OutputRatio(args.schedule_conservativeness)
        self.policy = schedule_policies.get(args.schedule_policy)
        self.max_running = min(args.max_running_requests, executor.max_rows)
        # Unlimited: the longest prompt fits beside one token for everybody.
        unlimited = executor.max_context + executor.max_rows
        budget = args.chunked_prefill_size
        self.token_budget = unlimited if budget == -1 else budget
        self.overlap = not args.disable_overlap_schedule
        self.in_flight: deque[Step] = deque()
        self.live: dict[str, list[Request]] = {}  # choices that have not ended, by rid
        self._deadlines = False  # some live request may have one
        self._next_step = 0
        self._completed_at = 0.0
        self._tokens_per_second = 0.0
        self._checked_idle = False

    # The loop -----------------------------------------------------------------------------

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Until `should_stop()`. Whatever escapes is fatal: EngineDeadError, InvariantViolation."""
        while not should_stop():
            if not self.step():
                self._idle()

    def step(self) -> bool:
        """One iteration; True if anything happened, so that another may find work at once."""
        self.heartbeat()
        messages, completed = self.inbox.receive(), self.life.completed_step
        for message in messages:
            self.handle(message)
        self._expire()
        launched = self._launch()
        if len(self.in_flight) > (1 if self.overlap else 0) or (self.in_flight and not launched):
            self._complete_oldest()
        self.output.flush()
        happened = bool(messages) or launched or completed != self.life.completed_step
        if happened:
            self._checked_idle = False
            if self.args.check_invariants == "step":
                self.check()
        return happened

    def _idle(self) -> None:
        """Sleeps until a message arrives; checks the idle state once in each idle period."""
        check = self.args.check_invariants != "off" and not self._checked_idle
        if self.inbox.wait(IDLE_CHECK_AFTER if check else IDLE_WAIT):
            return
        if check and self.is_idle:
            self.check()
            self._checked_idle = True

    @property
    def is_idle(self) -> bool:
        return not (self.in_flight or self.live or self.life.draining)

    @property
    def step_in_flight_since(self) -> float | None:
        """Clock time since which the engine has been busy with the oldest step, or None. The watchdog's thread asks."""
        with suppress(IndexError):
            return max(self.in_flight[0].launched_at, self._completed_at)
        return None

    def check(self) -> None:
        """Raises InvariantViolation."""
        try:
            invariants.check(self)
        except InvariantViolation:
            self.counters.invariant_violations_total += 1
            raise

    # Messages -----------------------------------------------------------------------------

    def handle(self, message: Message) -> None:
        if isinstance(message, Generate):
            self._submit(message)
        elif isinstance(message, Abort):
            self.abort(message.rid, message.reason)
        elif isinstance(message, TextStop):
            self._text_stop(message)
        elif isinstance(message, Control):
            self.outbox.send(self._control(message))
        else:
            raise TypeError(f"the scheduler got a {type(message).__name__}")

    def _submit(self, message: Generate) -> None:
        try:
            if message.rid in self.live:
                self.abort(message.rid, "another request took its id")
                raise RequestError(400, "invalid_value", "the request id is in use", param="rid")
            requests = self.intake.requests(message, self.clock())
            self._check_queue(len(requests))
        except RequestError as error:
            self.counters.num_refused_requests_total += 1
            self._send_error(message.rid, error)
            return
        self.live[message.rid] = requests
        self.life.waiting.extend(requests)
        self._deadlines |= message.deadline is not None
        self.counters.num_requests_total += len(requests)
        self.counters.prompt_tokens_total += requests[0].prompt_len

    def _check_queue(self, choices: int) -> None:
        queued, running = len(self.life.waiting), len(self.life.running)
        free_rows = max(0, self.max_running - running)
        limit = self.args.queue_limit + free_rows
        if queued + choices <= limit or not (queued or running):
            return
        tokens = sum(r.total_len for r in self.life.waiting)
        seconds = tokens / self._tokens_per_second if self._tokens_per_second else 1
        raise RequestError(
            503, "engine_overloaded",
            f"{queued} requests are waiting, the limit is {self.args.queue_limit}",
            retry_after=min(30, max(1, math.ceil(seconds))),
        )  # fmt: skip

    def abort(self, rid: str, reason: str) -> None:
        """Ends all choices of `rid`, or everything if it is empty. Idempotent."""
        for name in [rid] if rid else list(self.live):
            for request in list(self.live.get(name, ())):
                self.output.finish(request, FinishReason("abort", message=reason))
                self._end(request)
                self.counters.num_aborted_requests_total += 1

    def _text_stop(self, message: TextStop) -> None:
        for request in self.live.get(message.rid, ()):
            if request.choice == message.choice:
                request.keep_len = request.prompt_len + message.n_tokens
                request.ended = True  # the detokenizer has sent its last delta
                self._end(request)
                self.counters.num_finished_requests_total += 1
                return

    def _send_error(self, rid: str, error: RequestError) -> None:
        self.output.flush()  # what came before the error leaves before it
        failed = RequestFailed(rid, error.status, error.code, error.message, error.param, error.retry_after)
        self.outbox.send(failed)

    def _fail(self, rid: str, status: int, code: str, detail: str, *, poisoned: bool) -> None:
        """The whole request ends with an error; the detokenizer forgets what it had begun."""
        self._send_error(rid, RequestError(status, code, detail))
        for request in list(self.live[rid]):
            request.poisoned = poisoned
            if request.started:
                self.output.finish(request, FinishReason("abort", message=detail, status=status))
            request.ended = True
            self._end(request)
            self.counters.num_failed_requests_total += 1

    def _expire(self) -> None:
        if not self._deadlines:
            return
        now, pending = self.clock(), False
        for rid, requests in list(self.live.items()):
            deadline = requests[0].deadline
            if deadline is not None and deadline <= now:
                queued = all(r.state is State.WAITING and not r.started for r in requests)
                status = 503 if queued else 504
                self._fail(rid, status, "deadline_exceeded", "deadline exceeded", poisoned=False)
            pending |= deadline is not None
        self._deadlines = pending

    def _control(self, message: Control) -> ControlReply:
        if message.op == "stats":
            return ControlReply(message.id, True, stats=self.stats())
        if message.op == "flush_cache":
            if not self.is_idle:
                return ControlReply(message.id, False, "busy")
            self.life.cache.reset()
            return ControlReply(message.id, True)
        try:
            self.check()
        except InvariantViolation as violation:
            return ControlReply(message.id, False, str(violation))
        return ControlReply(message.id, True)

    # Steps --------------------------------------------------------------------------------

    def _launch(self) -> bool:
        decision = self._decide()
        if not decision:
            return False
        step = build_step(decision, self._next_step, self.life)
        self._next_step += 1
        self._count(step, decision)
        if self.args.check_invariants == "step":
            invariants.note_pages(step, self.life)
        step.launched_at = self.clock()
        step.handle = self.executor.launch(step.plan)
        self.in_flight.append(step)
        return True

    def _decide(self) -> Decision:
        """The next step; makes room first where pages are short. What is in flight may give
        pages back by itself, so it is waited for before anyone is retracted."""
        while True:
            decision = plan_step(self._view())
            if not decision.shortage:
                return decision
            if self.in_flight:
                self._drain()
            else:
                self.retract_youngest()

    def _view(self) -> View:
        life = self.life
        return View(
            running=life.running,
            waiting=life.waiting,
            order=self._order,
            cache=life.cache,
            free_pages=life.allocator.num_free,
            free_rows=min(life.table.num_free, self.max_running - len(life.running)),
            token_budget=self.token_budget,
            ratio=self.ratio.value,
        )

    def _order(self) -> Iterable[Request]:
        context = QueueContext(self.clock(), self.args.schedule_age_bound, self._prefix_length)
        return self.policy(self.life.waiting, context)

    def _prefix_length(self, request: Request) -> int:
        cache = self.life.cache
        version, length = request.prefix_hint
        if version != cache.version:
            ids = request.ids[: request.match_limit]
            length = cache.match_length(ids, request.extra_key)
            request.prefix_hint = (cache.version, length)
        return length

    def _count(self, step: Step, decision: Decision) -> None:
        counters = self.counters
        counters.steps_total += 1
        counters.dedup_waits_total += decision.dedup_waits
        for chunk in decision.chunks:
            counters.prefill_tokens_total += chunk.length
            request = chunk.request
            if chunk.match is not None:
                self.life.cache.record_use(chunk.match.node)
                if request.cached_tokens < 0:
                    request.cached_tokens = chunk.match.length
                    counters.cached_tokens_total += chunk.match.length
        self.ratio.after_step()

    def retract_youngest(self) -> None:
        """The request that arrived last leaves its row and pages and waits at the head."""
        self._drain()
        if not self.life.running:
            return
        self.ratio.after_retraction(self.life.running)
        self.life.retract(max(self.life.running, key=lambda r: r.seq))
        self.counters.num_retractions_total += 1

    def _drain(self) -> None:
        while self.in_flight:
            self._complete_oldest()

    # Results ------------------------------------------------------------------------------

    def _complete_oldest(self) -> None:
        """Waits for the oldest step; hands out its tokens, shares its pages, frees what it was
        the last to use."""
        step = self.in_flight[0]
        assert step.handle is not None
        result = step.handle.result()
        self.in_flight.popleft()
        self._measure(step)
        if result.step_id != step.plan.step_id or len(result.ids) != len(step.plan.sample_index):
            raise InvariantViolation("I7", f"result of step {step.plan.step_id} does not fit it")
        self.life.complete(step.plan.step_id)
        spans = zip(step.span_owners, step.plan.logprob_spans, result.prompt_logprobs, strict=True)
        for owner, span, values in spans:
            assert owner.prompt_logprobs is not None
            owner.prompt_logprobs.add(unpack_ids(span.targets), *values)
        tokens: list[int] = result.ids.tolist()
        slot = 0
        for entry in step.entries:
            token = tokens[slot] if entry.samples else None
            self._accept(entry, token, result, slot)
            slot += entry.samples
        self.life.reclaim()

    def _measure(self, step: Step) -> None:
        now = self.clock()
        seconds = now - max(step.launched_at, self._completed_at)
        self._completed_at = now
        if seconds > 0:
            rate = step.plan.num_tokens / seconds
            before = self._tokens_per_second or rate
            self._tokens_per_second = 0.9 * before + 0.1 * rate

    def _accept(self, entry: Entry, token: int | None, result: StepResult, slot: int) -> None:
        """What a completed step means for one request in it."""
        request = entry.request
        if request.ended:
            self.counters.dropped_tokens_total += token is not None
            return  # the only place where tokens are dropped
        if token is not None and not 0 <= token < self.executor.vocab_size:
            if token != -1:
                raise InvariantViolation("I7", f"sampled id {token} of {request.rid}")
            self._fail(
                request.rid, 500, "numerical_error", "the model gave no finite logits",
                poisoned=True,
            )  # fmt: skip
            return
        if entry.is_chunk:
            self.life.share(request, entry.end)
        if token is not None:
            request.append(token)
            self.counters.generation_tokens_total += 1
            record_logprobs(request, token, result, slot)
        elif entry.end < request.max_total_len:
            return  # a chunk in the middle of its prompt
        reason = finish_reason(request, token)
        if reason is None:
            self.output.token(request)
        else:
            self.output.finish(request, reason)
            self._end(request)
            self.counters.num_finished_requests_total += 1

    def _end(self, request: Request) -> None:
        choices = self.live[request.rid]
        choices.remove(request)
        if not choices:
            del self.live[request.rid]
        self.life.end(request)

    # Figures ------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Gauges and counters, flat, for metrics and logs."""
        life = self.life
        used = life.allocator.num_used - life.cache.evictable_pages
        return {
            "num_running_reqs": len(life.running),
            "num_queue_reqs": len(life.waiting),
            "num_pages": life.allocator.num_pages,
            "num_used_tokens": used * life.page_size,
            "max_total_num_tokens": life.allocator.num_pages * life.page_size,
            "token_usage": used / life.allocator.num_pages,
            "new_token_ratio": self.ratio.value,
            **self.counters.as_dict(),
            **life.cache.stats(),
        }


def _build_lifecycle(args: ServerArgs, executor: Executor) -> Lifecycle:
    allocator = PageAllocator(executor.num_pages, executor.page_size)
    cache = RadixCache(
        allocator, executor.page_size, eviction=args.radix_eviction_policy, enabled=not args.disable_radix_cache
    )
    longest = min(executor.max_context, executor.num_pages * executor.page_size)
    table = RequestTable(executor.max_rows, allocator.pages_for(longest))
    return Lifecycle(allocator, cache, table)
