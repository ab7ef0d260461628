"""Messages about requests: what is let in, what is refused, and what ends from outside."""

import heapq
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ..config import ServerArgs
from ..errors import RequestError, refusal
from ..messages import Abort, Generate, TextStop, unpack_ids
from ..sampling_params import Limits, splitmix64
from ..step_plan import Executor
from .figures import Counters
from .lifecycle import Lifecycle
from .live import LiveRequests
from .output import Output
from .request import Request, State

logger = logging.getLogger(__name__)

# Work outside of the engine that a request needs before it may be queued, or None.
Hold = Callable[[Request], Future[None] | None]


def hold_nothing(request: Request) -> None:
    return None


class Intake:
    """Turns each `Generate` into one `Request` a choice, or into the error that refuses it, and
    ends requests that are aborted, cut at a stop string, or past their deadline.

    What is let in can be served to its end by the KV cache alone, whoever sent it. `hold` may keep
    a request PENDING until a future is done: it owns nothing meanwhile, and is aborted and expires
    like a waiting one. Requests enter the queue in the order of arrival, held ones as they are
    released."""

    def __init__(
        self,
        args: ServerArgs,
        executor: Executor,
        *,
        life: Lifecycle,
        live: LiveRequests,
        output: Output,
        counters: Counters,
        eos_ids: Sequence[int],
        clock: Callable[[], float],
        max_message: float,
    ) -> None:
        """`clock` gives seconds; `max_message` is the largest message of the links in bytes."""
        self._life = life
        self._live = live
        self._output = output
        self._counters = counters
        self._clock = clock
        self._max_message = max_message
        self.hold: Hold = hold_nothing
        self.limits = Limits(
            context_length=executor.max_context,
            vocab_size=executor.vocab_size,
            max_choices=args.max_choices,
            max_total_tokens=executor.num_pages * executor.page_size,
        )
        self.max_running = min(args.running_limit, executor.max_rows)
        self.queue_limit = args.max_queued_requests
        self._eos_ids = _inside_vocabulary(eos_ids, executor.vocab_size)
        self._random: random.Random = random.SystemRandom()
        if args.random_seed is not None:
            self._random = random.Random(args.random_seed)
        self._arrivals = itertools.count()
        self._taken_calls: dict[int, str] = {}  # what was let in last, by API process
        # Heap of (deadline, rid); an entry may outlive its request.
        self._deadlines: list[tuple[float, str]] = []

    def handle(self, message: Generate | Abort | TextStop) -> None:
        match message:
            case Generate():
                self._submit(message)
            case Abort(rid, reason):
                self._live.abort(rid, reason)
            case TextStop(rid, choice, n_tokens):
                request = self._live.find(rid, choice)
                if request is not None:
                    self._live.cut(request, n_tokens)

    def _submit(self, message: Generate) -> None:
        try:
            if message.rid in self._live:
                self._live.abort(message.rid, "another request took its id")
                raise refusal("invalid_value", "the request id is in use", "rid")
            requests = self._requests(message)
            call, num_choices = message.call or (message.rid, len(requests))
            self._check_queue(call, num_choices, message.api)
        except RequestError as error:
            self._counters.num_refused_requests_total += 1
            self._output.fail(message, error)
            return
        self._live.add(requests)
        if message.deadline is not None:
            heapq.heappush(self._deadlines, (message.deadline, message.rid))
        for request in requests:
            until = self.hold(request)
            if until is None:
                self._life.enqueue(request)
            else:
                self._life.hold(request, until)

    def _requests(self, message: Generate) -> list[Request]:
        """One Request a choice. Raises RequestError for what is malformed or can never fit."""
        ids = unpack_ids(message.input_ids)
        self._check_message(message, len(ids))
        params = self.limits.admit(ids, message.sampling, "prompt", {}, clip=False)
        assert params.max_new_tokens is not None
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._eos_ids
        seed = params.seed
        if seed is None:
            seed = self._random.getrandbits(64)
        arrival = self._clock()
        return [
            Request(
                message,
                choice,
                seq=next(self._arrivals),
                arrival=arrival,
                seed=splitmix64(seed + choice),
                max_total_len=len(ids) + params.max_new_tokens,
                stop_ids=stop_ids,
            )
            for choice in range(params.n)
        ]

    def _check_message(self, message: Generate, prompt_len: int) -> None:
        if not message.rid:  # an Abort of "" ends everything
            raise refusal("invalid_value", "the request id is empty", "rid")
        start = message.logprob_start
        if not -1 <= start <= prompt_len:
            raise refusal(
                "invalid_value", f"logprob_start must be in [-1, {prompt_len}]", "logprob_start"
            )
        most = self.limits.vocab_size
        for name, top in (
            ("top_logprobs", message.top_logprobs),
            ("prompt_logprobs", message.prompt_top),
        ):
            if not 0 <= top <= most:
                raise refusal("invalid_value", f"{name} must be in [0, {most}]", name)
        scored = prompt_len - start if start >= 0 else 0
        size = 8 * scored * (1 + message.prompt_top)  # an id and a value each
        if message.prompt_logprobs is not None:
            size += 4 * scored  # a rank each
        if size > self._max_message / 2:
            text = (
                f"logprobs of {scored} prompt tokens with {message.prompt_top} others each "
                "do not fit an answer"
            )
            ranked = message.prompt_logprobs is not None
            raise refusal("invalid_value", text, "prompt_logprobs" if ranked else "logprob_start")

    def _check_queue(self, call: str, num_choices: int, api: int) -> None:
        """A call is let in as a whole: where it fits, or has the queue for itself. Raises
        RequestError. A server has refused most before (server/admission.py)."""
        if self.queue_limit is None or call == self._taken_calls.get(api):
            return
        most = self.queue_limit + self.max_running
        if num_choices > most:
            text = f"{num_choices} choices in one call; {most} can run and wait"
            raise refusal("invalid_value", text)
        queued = len(self._life.waiting) + len(self._life.pending)
        limit = self.queue_limit + max(0, self.max_running - len(self._life.running))
        if queued + num_choices > limit and (queued or not limit):
            seconds = self._life.waiting.num_tokens * self._counters.seconds_per_token()
            raise RequestError(
                status=503,
                code="engine_overloaded",
                message=f"{queued} requests are waiting, the limit is {self.queue_limit}",
                retry_after=min(30, 1 + int(seconds)),
            )
        self._taken_calls[api] = call

    def release(self) -> bool:
        """Queues the held requests whose future is done; a future that failed fails its request.
        True if there were any."""
        ready = [(request, until) for request, until in self._life.pending.items() if until.done()]
        for request, until in ready:
            if request.ended:
                continue  # another choice of the same request has just failed it
            error = until.exception()
            if error is None:
                self._life.enqueue(request)
            elif isinstance(error, RequestError):
                self._live.fail(request.rid, error)
            else:
                logger.error("request %s could not be prepared", request.rid, exc_info=error)
                self._live.fail(
                    request.rid,
                    RequestError(
                        status=500,
                        code="internal_error",
                        message="the request could not be prepared",
                    ),
                )
        return bool(ready)

    def expire(self) -> None:
        """Fails every request whose deadline has passed: 503 where it never ran, otherwise 504."""
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            deadline, rid = heapq.heappop(self._deadlines)
            requests = self._live.get(rid)
            if not requests or requests[0].source.deadline != deadline:
                continue
            status = 503 if all(_never_ran(request) for request in requests) else 504
            error = RequestError(
                status=status,
                code="deadline_exceeded",
                message="the request has not ended within the server's --request-timeout",
            )
            self._live.fail(rid, error)


def _never_ran(request: Request) -> bool:
    return request.state in (State.PENDING, State.WAITING) and not request.started


def _inside_vocabulary(eos_ids: Sequence[int], vocab_size: int) -> frozenset[int]:
    outside = [token for token in eos_ids if not 0 <= token < vocab_size]
    if outside:
        logger.warning("end ids %s are ignored: the vocabulary has %d ids", outside, vocab_size)
    return frozenset(eos_ids).difference(outside)
