"""The loop of rank 0: messages in, steps out, tokens to the clients."""

# One iteration takes in messages, launches the next step and then finishes the step before it. With
# overlap the step just launched keeps running while the host finishes its predecessor and plans its
# successor; without, a step is finished as soon as it is launched. That is the only difference: how
# many steps are in flight when an iteration ends.

import heapq
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count

from .. import messages as msg
from ..config import ServerArgs
from ..errors import RequestError, refusal, require
from ..sampling_params import Limits, splitmix64
from ..step_plan import Executor, StepResult
from . import invariants
from .batch_builder import Step, build_step
from .lifecycle import Lifecycle
from .output import Output, finish_reason, record_logprobs
from .policy import Decision, Entry, OutputRatio, QueueContext, plan_step, schedule_policies
from .request import Request, State

IDLE_WAIT = 1.0  # seconds between heartbeats when there is nothing to do
IDLE_CHECK_AFTER = 0.1  # seconds of idleness before the runtime checks itself

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Requests are counted by choice: n=4 counts four times. accepted = finished + aborted + failed
    + live."""

    num_requests_total: int = 0  # accepted
    num_refused_requests_total: int = 0  # whole requests answered with an error at submission
    num_finished_requests_total: int = 0
    num_aborted_requests_total: int = 0
    num_failed_requests_total: int = 0
    num_retractions_total: int = 0
    prompt_tokens_total: int = 0
    prefill_tokens_total: int = 0  # prompt tokens computed, again after a retraction too
    cached_tokens_total: int = 0  # prompt tokens not computed at first admission
    generation_tokens_total: int = 0
    dropped_tokens_total: int = 0  # sampled for a request that had ended, or past its stop string
    dedup_waits_total: int = 0  # request-steps spent waiting for another's page
    steps_total: int = 0


class Scheduler:
    """`step()` is the whole machine; `run()` repeats it and sleeps when there is nothing to do."""

    def __init__(
        self, args: ServerArgs, executor: Executor, inbox: msg.Inbox, outbox: msg.Outbox, *,
        eos_ids: Sequence[int], clock: Callable[[], float] = time.monotonic, max_message: float = math.inf,
    ) -> None:  # fmt: skip
        self.args, self.executor, self.clock = args, executor, clock
        self.inbox, self.outbox, self._max_message = inbox, outbox, max_message  # in bytes
        self.heartbeat: Callable[[], None] = lambda: None  # called in every iteration
        pool = executor.num_pages * executor.page_size
        self.limits = Limits(executor.max_context, executor.vocab_size, args.max_choices, pool)
        if outside := [i for i in eos_ids if not 0 <= i < executor.vocab_size]:
            logger.warning(
                "end ids %s are ignored: the vocabulary has %d ids", outside, executor.vocab_size
            )
        self._random = (
            random.SystemRandom() if args.random_seed is None else random.Random(args.random_seed)
        )
        self._eos_ids, self._arrivals = frozenset(eos_ids).difference(outside), count()
        sizes = executor.num_pages, executor.page_size, executor.max_rows, executor.max_context
        self.life = Lifecycle(
            *sizes, eviction=args.radix_eviction_policy, sharing=not args.disable_radix_cache
        )
        self.output = Output(outbox)
        self.counters, self.ratio = Counters(), OutputRatio(args.schedule_conservativeness)
        self.policy = schedule_policies.get(args.schedule_policy)
        default = max(64, 4 * args.max_running_requests)
        self.queue_limit = default if args.max_queued_requests is None else args.max_queued_requests
        self.max_running = min(args.max_running_requests, executor.max_rows)
        # Unlimited: the longest prompt fits beside one token for everybody.
        unlimited = executor.max_context + executor.max_rows
        self.token_budget = (
            unlimited if args.chunked_prefill_size == -1 else args.chunked_prefill_size
        )
        self.max_in_flight = 0 if args.disable_overlap_schedule else 1  # when an iteration ends
        self.in_flight: deque[Step] = deque()
        self.live: dict[str, list[Request]] = {}  # choices that have not ended, by rid
        self._deadlines: list[tuple[float, str]] = []  # heap; its entries may outlive their request
        self._completed_at = self._busy_seconds = 0.0
        self._checked_idle = False
        self._taken_call = ""  # the one that was let in last

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
            self._handle(message)
        self._expire()
        launched = self._launch()
        if len(self.in_flight) > (self.max_in_flight if launched else 0):
            self._complete_oldest()
        self.output.flush()
        happened = bool(messages) or launched or completed != self.life.completed_step
        if happened:
            self._checked_idle = False
            if self.args.check_invariants == "step":
                self.check()
        return happened

    # Sleeps until a message arrives; checks the idle state once in each idle period.
    def _idle(self) -> None:
        check = self.args.check_invariants != "off" and not self._checked_idle
        if not self.inbox.wait(IDLE_CHECK_AFTER if check else IDLE_WAIT) and check and self.is_idle:
            self.check()
            self._checked_idle = True

    @property
    def is_idle(self) -> bool:
        return not (self.in_flight or self.live or self.life.draining)

    @property
    def step_in_flight_since(self) -> float | None:
        """Clock time since which the engine has been busy with the oldest step, or None. The
        watchdog's thread asks."""
        with suppress(IndexError):
            return max(self.in_flight[0].launched_at, self._completed_at)
        return None

    def check(self) -> None:
        invariants.check(self)

    # Messages -----------------------------------------------------------------------------

    def _handle(self, message: msg.Message) -> None:
        match message:
            case msg.Generate():
                self._submit(message)
            case msg.Abort(rid, reason):
                self.abort(rid, reason)
            case msg.TextStop(rid, choice, n_tokens):
                for request in [r for r in self.live.get(rid, ()) if r.choice == choice]:
                    request.keep_len = request.prompt_len + n_tokens
                    self._end(request)  # the detokenizer has sent its last delta
                    self.counters.num_finished_requests_total += 1
            case msg.Control(number, "stats"):
                self.outbox.send(msg.ControlReply(number, True, self.stats()))
            case msg.Control(number, "flush_cache"):
                if idle := self.is_idle:
                    self.life.cache.reset()
                self.outbox.send(msg.ControlReply(number, idle))
            case _:
                raise TypeError(f"the scheduler got a {type(message).__name__}")

    def _submit(self, message: msg.Generate) -> None:
        try:
            if message.rid in self.live:
                self.abort(message.rid, "another request took its id")
                raise RequestError(400, "invalid_value", "the request id is in use", param="rid")
            requests = self._requests(message)
            self._check_queue(*(message.call or (message.rid, len(requests))))
        except RequestError as error:
            self.counters.num_refused_requests_total += 1
            self._send_error(message.rid, error)
            return
        self.live[message.rid] = requests
        self.life.waiting.extend(requests)
        if message.deadline is not None:
            heapq.heappush(self._deadlines, (message.deadline, message.rid))
        self.counters.num_requests_total += len(requests)
        self.counters.prompt_tokens_total += requests[0].prompt_len * len(requests)

    # One Request a choice, which the pool alone can serve to its end, whoever sent it. Raises
    # RequestError.
    def _requests(self, message: msg.Generate) -> list[Request]:
        ids = msg.unpack_ids(message.input_ids)
        if not message.rid:
            raise refusal(
                "invalid_value", "the request id is empty", "rid"
            )  # an Abort of "" ends everything
        for name, low, high in (
            ("logprob_start", -1, len(ids)),
            ("top_logprobs", 0, self.limits.vocab_size),
        ):
            if not low <= getattr(message, name) <= high:
                raise refusal("invalid_value", f"{name} must be in [{low}, {high}]", name)
        scored = len(ids) - message.logprob_start if message.logprob_start >= 0 else 0
        if 8 * scored * (1 + message.top_logprobs) > self._max_message / 2:
            text = f"logprobs of {scored} prompt tokens with {message.top_logprobs} others each do not fit an answer"
            raise refusal("invalid_value", text, "logprob_start")
        params = self.limits.admit(ids, message.sampling, "prompt", {}, clip=False)
        assert params.max_new_tokens is not None
        limit, seed = len(ids) + params.max_new_tokens, params.seed
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self._eos_ids
        )
        seed, now = self._random.getrandbits(64) if seed is None else seed, self.clock()
        return [
            Request(message, i, next(self._arrivals), now, splitmix64(seed + i), limit, stop_ids)
            for i in range(params.n)
        ]

    # A call is taken as a whole: where it fits, or has the queue for itself. Raises RequestError.
    def _check_queue(self, call: str, choices: int) -> None:
        if call == self._taken_call:
            return
        if choices > (most := self.queue_limit + self.max_running):
            raise refusal(
                "invalid_value", f"{choices} choices in one call; {most} can run and wait"
            )
        queued, running = len(self.life.waiting), len(self.life.running)
        limit = self.queue_limit + max(0, self.max_running - running)
        if queued + choices > limit and (queued or not limit):
            done = self.counters.prefill_tokens_total + self.counters.generation_tokens_total
            seconds = (
                sum(r.total_len for r in self.life.waiting) * self._busy_seconds / max(1, done)
            )
            text = f"{queued} requests are waiting, the limit is {self.queue_limit}"
            raise RequestError(
                503, "engine_overloaded", text, retry_after=min(30, 1 + int(seconds))
            )
        self._taken_call = call

    def abort(self, rid: str, reason: str) -> None:
        """Ends all choices of `rid`, or everything if it is empty. Idempotent."""
        for name in [rid] if rid else list(self.live):
            for request in list(self.live.get(name, ())):
                self._end(request, msg.FinishReason("abort", message=reason))
                self.counters.num_aborted_requests_total += 1

    def _send_error(self, rid: str, error: RequestError) -> None:
        self.output.flush()  # what came before the error leaves before it
        what = error.status, error.code, error.message, error.param, error.retry_after
        self.outbox.send(msg.RequestFailed(rid, *what))

    # The whole request ends with an error; the detokenizer forgets what it had begun.
    def _fail(self, rid: str, error: RequestError) -> None:
        self._send_error(rid, error)
        reason = msg.FinishReason("abort", message=error.message, status=error.status)
        for request in list(self.live[rid]):
            self._end(request, reason if request.started else None)
            self.counters.num_failed_requests_total += 1

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self.clock():
            deadline, rid = heapq.heappop(self._deadlines)
            requests = self.live.get(rid)
            if requests and requests[0].source.deadline == deadline:
                queued = all(r.state is State.WAITING and not r.started for r in requests)
                self._fail(
                    rid,
                    RequestError(503 if queued else 504, "deadline_exceeded", "deadline exceeded"),
                )

    # Steps --------------------------------------------------------------------------------

    def _launch(self) -> bool:
        # What is in flight may give pages back by itself, so it is waited for before anyone is
        # retracted.
        while (decision := self._plan()).shortage:
            if self.in_flight:
                self._drain()
            else:
                self.retract_youngest()
        if not decision:
            return False
        life = self.life
        plan, entries = build_step(decision, self.counters.steps_total, life)
        self._count(decision)
        checked = entries if self.args.check_invariants == "step" else ()
        # Independent of how the requests change later.
        page_sets = [life.table.pages(e.request.row, e.request.num_pages).copy() for e in checked]
        self.in_flight.append(
            Step(plan, entries, page_sets, self.clock(), self.executor.launch(plan))
        )
        return True

    def _plan(self) -> Decision:
        life = self.life
        rows = min(len(life.table.free_rows), self.max_running - len(life.running))
        context = QueueContext(self.clock(), self.args.schedule_age_bound, self._prefix_length)
        queue = partial(self.policy, life.waiting, context)
        return plan_step(life, queue, rows, self.token_budget, self.ratio.value)

    def _prefix_length(self, request: Request) -> int:
        cache = self.life.cache
        if request.prefix_hint[0] != cache.version:
            length = cache.match_length(request.ids[: request.match_limit], request.extra_key)
            request.prefix_hint = (cache.version, length)
        return request.prefix_hint[1]

    def _count(self, decision: Decision) -> None:
        self.counters.steps_total += 1
        self.counters.dedup_waits_total += decision.dedup_waits
        for request, start, end, *_, match in decision.chunks:
            self.counters.prefill_tokens_total += end - start
            if match is not None:
                self.life.cache.record_use(match.node)
                if request.cached_tokens < 0:
                    request.cached_tokens = match.length
                    self.counters.cached_tokens_total += match.length
        self.ratio.after_step()

    def retract_youngest(self) -> None:
        """The request that arrived last leaves its row and pages and waits at the head."""
        self._drain()
        if running := self.life.running:
            self.ratio.after_retraction(running)
            self.life.retract(max(running, key=lambda r: r.seq))
            self.counters.num_retractions_total += 1

    def _drain(self) -> None:
        while self.in_flight:
            self._complete_oldest()

    # Results ------------------------------------------------------------------------------

    # Waits for the oldest step; hands out its tokens, shares its pages, frees what it was the last
    # to use.
    def _complete_oldest(self) -> None:
        step = self.in_flight[0]
        result = step.handle.result()
        self.in_flight.popleft()
        begin, self._completed_at = max(step.launched_at, self._completed_at), self.clock()
        self._busy_seconds += self._completed_at - begin
        plan = step.plan
        samples = plan.num_samples.tolist()
        entries_sampled = sum(1 for n in samples if n > 0)
        fits = (
            result.step_id == plan.step_id
            and len(result.ids) == sum(samples)
            and len(result.counts) == entries_sampled
        )
        require(fits, "I7", f"result of step {plan.step_id} does not fit it")
        self.life.completed_step = plan.step_id
        for span, values in zip(plan.logprob_spans, result.prompt_logprobs, strict=True):
            buffer = step.entries[span.index].request.prompt_logprobs
            assert buffer is not None
            buffer.add(msg.unpack_ids(span.targets), *values)
        tokens: list[int] = result.ids.tolist()
        slot = 0
        for entry, n in zip(step.entries, samples, strict=True):
            self._accept(entry, tokens[slot] if n else None, result, slot)
            slot += n
        self.life.reclaim()

    def _accept(self, entry: Entry, token: int | None, result: StepResult, slot: int) -> None:
        request = entry.request
        if request.ended:
            self.counters.dropped_tokens_total += token is not None
            return  # the only place where tokens are dropped
        if token == -1:
            for choice in self.live[request.rid]:
                choice.poisoned = True
            self._fail(
                request.rid, RequestError(500, "numerical_error", "the model gave no finite logits")
            )
            return
        if entry.is_chunk:
            self.life.share(request, entry.end)
        if token is not None:
            require(
                0 <= token < self.executor.vocab_size, "I7", f"sampled id {token} of {request.rid}"
            )
            request.append(token)
            self.counters.generation_tokens_total += (
                not request.params.stop
            )  # else at the end: some may not count
            record_logprobs(request, token, result, slot)
        elif entry.end < request.max_total_len:
            return  # a chunk in the middle of its prompt
        if reason := finish_reason(request, token):
            self._end(request, reason)
            self.counters.num_finished_requests_total += 1
        else:
            self.output.add(request, None)

    # No token is computed for the request any more; with a `reason` its last delta leaves.
    def _end(self, request: Request, reason: msg.FinishReason | None = None) -> None:
        if reason is not None:
            self.output.add(request, reason)
        request.ended = True
        if request.params.stop:
            dropped = 0 if request.keep_len is None else max(0, request.num_ids - request.keep_len)
            self.counters.generation_tokens_total += request.num_output - dropped
            self.counters.dropped_tokens_total += dropped
        choices = self.live[request.rid]
        choices.remove(request)
        if not choices:
            del self.live[request.rid]
        self.life.end(request)

    # Figures ------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        life, cache, total = self.life, self.life.cache, self.life.allocator.num_pages
        used = total - life.allocator.num_free - cache.evictable_pages
        return {
            "num_running_reqs": len(life.running),
            "num_queue_reqs": len(life.waiting),
            "num_pages": total,
            "num_used_tokens": used * life.page_size,
            "max_total_num_tokens": total * life.page_size,
            "token_usage": used / total,
            "new_token_ratio": self.ratio.value,
            **asdict(self.counters),
            "cache_pages": cache.total_pages,
            "cache_evictable_pages": cache.evictable_pages,
            "cache_nodes": cache.num_nodes,
            "cache_lookups_total": cache.lookups_total,
            "cache_hits_total": cache.hits_total,
            "evicted_pages_total": cache.evicted_pages_total,
        }
