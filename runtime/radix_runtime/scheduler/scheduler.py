"""The loop of rank 0: messages in, steps out, tokens to the clients."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import numpy as np

from .. import messages as msg
from ..channel import Inbox, Outbox
from ..config import ServerArgs
from ..errors import MaskError, RequestError
from ..sampling_params import Limits
from ..step_plan import EngineCommand, Executor, StepResult
from ..step_times import chrome_trace
from . import figures, invariants
from .batch_builder import Step, build_step
from .constraints import ConstrainedAnswers, MakeMasks
from .control import Operations
from .decision import Decision
from .intake import Intake
from .lifecycle import Lifecycle
from .live import LiveRequests
from .output import Output
from .policy import OutputRatio, QueueContext, plan_step, schedule_policies
from .request import Request
from .results import Results
from .step_log import StepLog, step_times

IDLE_WAIT = 1.0  # seconds between heartbeats when there is nothing to do
IDLE_CHECK_AFTER = 0.1  # seconds of idleness before the runtime checks itself
PENDING_WAIT = 0.005  # seconds between looks at what is awaited from outside


class Scheduler:
    """One iteration, `step()`, is the whole machine; `run()` repeats it and sleeps when there is
    nothing to do. In its order it

    1. takes in messages: `intake` validates, queues, aborts, and fails what is past its deadline;
       `operations` answers what Control messages ask for;
    2. plans the next step (`policy.plan_step`), takes rows and pages for it (`build_step`) and
       launches it. A shortage of pages first waits for the steps in flight, then retracts the
       request that arrived last;
    3. waits for the step before it; `results` accepts its tokens and ends what is finished;
    4. sends what the clients get (`output`).

    With overlap the step just launched keeps running while the host finishes its predecessor and
    plans its successor; without, a step is finished as soon as it is launched. That is the only
    difference: how many steps are in flight when an iteration ends.

    Owners: `life` every row and page, and the queue; `live` the requests that have not ended, and
    how they end; `in_flight` the launched steps; `operations` what Control messages may ask for.
    Errors of a request become its answer. Whatever `step` raises is fatal for the instance:
    EngineDeadError, or InvariantViolation."""

    _checked_idle = False  # since it has been idle
    _completed_at = 0.0  # when the newest completed step was

    def __init__(
        self,
        args: ServerArgs,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        *,
        eos_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        max_message: float = math.inf,
        make_masks: MakeMasks | None = None,
    ) -> None:
        """`clock` gives seconds, `max_message` bounds the bytes of a message of `outbox`, and
        `make_masks` makes the masker of constrained answers when the first comes."""
        self.args = args
        self.executor = executor
        self.inbox = inbox
        self.outbox = outbox
        self.clock = clock
        self.heartbeat: Callable[[], None] = lambda: None  # called in every iteration
        self.counters = figures.Counters()
        self.life = _lifecycle(args, executor)
        self.output = Output(outbox, self.life.rows)
        self.live = LiveRequests(
            life=self.life,
            output=self.output,
            counters=self.counters,
            vocab_size=executor.vocab_size,
        )
        self.intake = Intake(
            args,
            executor,
            life=self.life,
            live=self.live,
            output=self.output,
            counters=self.counters,
            eos_ids=eos_ids,
            clock=clock,
            max_message=max_message,
        )
        self.constraints = ConstrainedAnswers(make_masks, inbox.wake)
        self.intake.hold = self.constraints.hold
        self.results = _results(self)
        self.ratio = OutputRatio(args.schedule_conservativeness)
        self.policy = schedule_policies.get(args.schedule_policy)
        self.token_budget = _token_budget(args, executor)
        self.max_in_flight = 0 if args.disable_overlap_schedule else 1  # when an iteration ends
        self.in_flight: deque[Step] = deque()
        self.step_log = StepLog()  # of what the steps took; an owner may set another
        self.operations = _operations(self)
        self._decision = Decision()  # the last one

    # The loop -----------------------------------------------------------------------------

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Until `should_stop()`. Whatever escapes is fatal: EngineDeadError, InvariantViolation."""
        while not should_stop():
            if not self.step():
                self._idle()

    def step(self) -> bool:
        """One iteration; True if anything happened, so that another may find work at once."""
        self.heartbeat()
        messages = self.inbox.receive()
        completed = self.life.completed_step
        for message in messages:
            self._handle(message)
        released = self.intake.release()
        answered = self._send_late_replies()
        self.intake.expire()
        self._fail_constrained()
        launched = self._launch()
        if len(self.in_flight) > (self.max_in_flight if launched else 0):
            self._complete_oldest()
        self.constraints.forget_ended()
        self.output.flush()
        completed_any = completed != self.life.completed_step
        happened = bool(messages) or released or answered or launched or completed_any
        if happened:
            self._checked_idle = False
            if self.args.check_invariants == "step":
                self.check()
        return happened

    def _idle(self) -> None:
        """Sleeps until a message arrives; checks the idle state once in each idle period."""
        check = self.args.check_invariants != "off" and not self._checked_idle
        timeout = IDLE_CHECK_AFTER if check else IDLE_WAIT
        self.step_log.flush()
        if self.life.pending or self.operations:
            timeout = PENDING_WAIT
        arrived = self.inbox.wait(timeout)
        if check and not arrived and self.is_idle:
            self.check()
            self._checked_idle = True

    @property
    def limits(self) -> Limits:
        """What a request may ask for."""
        return self.intake.limits

    @property
    def is_idle(self) -> bool:
        """No request lives, no step is in flight, every row is given back."""
        return not (self.in_flight or self.live or self.life.draining)

    @property
    def step_in_flight_since(self) -> float | None:
        """Clock time since which the engine has been busy with the oldest step, or None. The
        watchdog's thread asks."""
        with suppress(IndexError):
            return max(self.in_flight[0].launched_at, self._completed_at)
        return None

    def check(self) -> None:
        """Raises InvariantViolation if a state that must not exist is found."""
        invariants.check(self.life, self.live, self.counters, self.in_flight)

    def stats(self) -> dict[str, float]:
        """Figures for metrics and logs; see `figures.stats`."""
        return figures.stats(self.life, self.counters, self.ratio, self._decision)

    def flush_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing is done, while requests run or wait."""
        if not self.is_idle:
            return False
        self.life.reset_cache()
        return True

    def call_engine(self, command: msgspec.Raw) -> Future[list[str]]:
        """Has the engine execute an EngineCommand, in msgpack, behind the steps launched so far; a
        line from each rank. Raises msgspec.DecodeError."""
        return self.executor.call(msg.unpack_body(command, EngineCommand))

    def step_trace(self, steps: msgspec.Raw) -> bytes:
        """The last `steps` steps, an int in msgpack, as a trace in Chrome's format. Raises
        msgspec.DecodeError."""
        return chrome_trace(self.step_log.recent[-msg.unpack_body(steps, int) :])

    def _send_late_replies(self) -> bool:
        replies = self.operations.late_replies()
        for reply in replies:
            self.outbox.send(reply, reply.api)
        return bool(replies)

    def _handle(self, message: msg.Message) -> None:
        match message:
            case msg.Generate() | msg.Abort() | msg.TextStop():
                self.intake.handle(message)
            case msg.Control():
                reply = self.operations.answer(message)
                if reply is not None:
                    self.outbox.send(reply, reply.api)
            case _:
                raise TypeError(f"the scheduler got a {type(message).__name__}")

    # Steps --------------------------------------------------------------------------------

    def _launch(self) -> bool:
        planned_at = self.clock()
        self._decision = decision = self._plan_with_room()
        if not decision:
            return False
        plan = build_step(decision, self.counters.steps_total, self.life)
        self._count(decision)
        launched_at = self.clock()
        handle = self.executor.launch(plan, self.constraints.launch(plan, self.life.rows))
        step = Step(
            plan=plan,
            streams=decision.decode,
            chunks=decision.chunks,
            planned_at=planned_at,
            launched_at=launched_at,
            queued_at=self.clock(),
            handle=handle,
        )
        if self.args.check_invariants == "step":
            step.remember_pages(self.life)
        self.in_flight.append(step)
        self.constraints.ask(self.life.completed_step)
        return True

    def _plan_with_room(self) -> Decision:
        """Steps in flight may give pages back by themselves, so they are waited for before anyone
        is retracted."""
        while True:
            decision = self._plan()
            if not decision.shortage:
                return decision
            if self.in_flight:
                self._drain()
            else:
                self.retract_youngest()

    def _plan(self) -> Decision:
        life = self.life
        return plan_step(
            life,
            self._queue,
            free_rows=min(len(life.table.free_rows), self.intake.max_running - len(life.running)),
            token_budget=self.token_budget,
            max_samples=self.executor.max_samples,
            ratio=self.ratio.value,
        )

    def _queue(self) -> Iterable[Request]:
        """The waiting requests in the order of the schedule policy."""
        context = QueueContext(
            now=self.clock(),
            age_bound=self.args.schedule_age_bound,
            prefix_length=self._prefix_length,
        )
        return self.policy(self.life.waiting, context)

    def _prefix_length(self, request: Request) -> int:
        cache = self.life.cache
        if request.prefix_hint[0] != cache.version:
            length = cache.match_length(request.ids[: request.match_limit], request.extra_key)
            request.prefix_hint = (cache.version, length)
        return request.prefix_hint[1]

    def _count(self, decision: Decision) -> None:
        self.counters.steps_total += 1
        self.counters.dedup_waits_total += decision.dedup_waits
        for entry in decision.chunks:
            self.counters.prefill_tokens_total += entry.end - entry.start
            if entry.match is None:
                continue
            self.life.cache.record_use(entry.match.node)
            if entry.request.cached_tokens < 0:
                entry.request.cached_tokens = entry.match.length
                entry.request.queue_seconds = self.clock() - entry.request.arrival
                self.counters.cached_tokens_total += entry.match.length
        self.ratio.after_step()

    def retract_youngest(self) -> None:
        """The request that arrived last leaves its row and pages and waits at the head."""
        self._drain()
        running = self.life.running
        if running:
            self.ratio.after_retraction(running)
            self.life.retract(max(running, key=lambda request: request.seq))
            self.counters.num_retractions_total += 1

    def _drain(self) -> None:
        while self.in_flight:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        """Waits for the oldest step in flight and hands its result to `results`."""
        step = self.in_flight[0]
        awaited_at = self.clock()
        try:
            result = step.handle.result()
        except MaskError as error:
            result = self._without_masks(step, error)
        self.in_flight.popleft()
        began = max(step.launched_at, self._completed_at)
        self._completed_at = self.clock()
        self.counters.busy_seconds_total += self._completed_at - began
        self._fail_constrained()
        self.results.complete(step, result)
        times = step_times(
            step,
            result,
            awaited=awaited_at,
            completed=self._completed_at,
            accepted=self.clock(),
        )
        self.step_log.add(times)
        self.constraints.ask(self.life.completed_step)

    def _fail_constrained(self) -> None:
        """Fails the requests whose grammar cannot go on, before a token of theirs counts that it
        did not allow."""
        for request, error in self.constraints.take_failures():
            if not request.ended:
                self.live.fail(request.rid, error)

    def _without_masks(self, step: Step, error: MaskError) -> StepResult:
        """The result of a step that has drawn nothing, after which its requests cannot go on."""
        failure = RequestError(status=500, code="grammar_failed", message=str(error))
        for request in step.requests(self.life.rows):
            if not request.ended:
                self.live.fail(request.rid, failure)
        step.plan.logprob_spans.clear()
        num_samples = step.plan.num_samples[step.plan.num_samples > 0]
        return StepResult(
            step_id=step.plan.step_id,
            ids=np.full(num_samples.sum(), -1, np.int32),
            counts=np.ones_like(num_samples),
        )


def _results(scheduler: Scheduler) -> Results:
    return Results(
        life=scheduler.life,
        live=scheduler.live,
        output=scheduler.output,
        counters=scheduler.counters,
    )


def _operations(scheduler: Scheduler) -> Operations:
    operations = Operations()
    operations.register("stats", lambda body: scheduler.stats())
    operations.register("flush_cache", lambda body: scheduler.flush_cache())
    operations.register("engine", scheduler.call_engine)
    operations.register("step_trace", scheduler.step_trace)
    return operations


def _lifecycle(args: ServerArgs, executor: Executor) -> Lifecycle:
    return Lifecycle(
        num_pages=executor.num_pages,
        page_size=executor.page_size,
        max_rows=executor.max_rows,
        max_len=executor.max_context,
        eviction=args.radix_eviction_policy,
        sharing=not args.disable_radix_cache,
        cache_groups=executor.cache_groups,
        max_samples=executor.max_samples,
        host_pages=executor.host_pages,
    )


def _token_budget(args: ServerArgs, executor: Executor) -> int:
    """Tokens of a step at most. Unlimited is what lets the longest prompt run beside one token for
    everybody."""
    if args.step_tokens == -1:
        return executor.max_context + executor.max_rows
    return args.step_tokens
