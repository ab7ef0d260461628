"""Admission: whether another call may join those that wait, told before its prompt is tokenized."""

import math
import random
from collections import Counter
from contextlib import AbstractContextManager

from ..config import ServerArgs
from ..errors import RequestError, refusal
from ..messages import Generate, num_ids

_CHOICE_BYTES = 16 << 10  # what a choice holds in all processes beside its tokens, about
_TOKEN_BYTES = 4
_LONGEST_RETRY = 30.0  # seconds
_JITTER = 0.2  # share by which Retry-After varies, so that clients do not come back together


class Admission:
    """The bounds of the queue: bytes that calls hold, seconds of work that waits, and, where it was
    given, a count. A call is let in as a whole, and always where nobody waits. Belongs to the event
    loop's thread.

    `waiting_tokens` is the work of the requests that have not had their first token."""

    def __init__(self, args: ServerArgs) -> None:
        self._max_bytes = args.max_queue_bytes
        self._max_seconds = args.max_queue_seconds
        self._max_of_key = args.max_requests_per_key or math.inf
        self._of_key: Counter[str] = Counter()  # choices
        self._max_queued = math.inf
        if args.max_queued_requests is not None:
            self._max_queued = args.max_queued_requests
        self.set_running(args.running_limit)
        self.bytes = 0
        self.choices = 0
        self.waiting_tokens = 0
        self.speed = Speed()

    def set_running(self, count: int) -> None:
        """So many requests run at a time."""
        self._max_running = count
        self._max_choices = count + self._max_queued

    @property
    def seconds(self) -> float:
        """How long a new request would wait, as far as that is known."""
        return self.speed.seconds(self.waiting_tokens)

    def check(self, key: str = "") -> None:
        """Raises RequestError 503, or 429 for this `key` (Caller.key), if no further call may join.
        Cheap: asked before the body is read."""
        if key and self._of_key[key] >= self._max_of_key:
            raise self._too_many_of_key()
        if self.choices >= self._max_choices:
            raise self._full(f"the limit is {self._max_choices} running and waiting together")
        if self.bytes >= self._max_bytes:
            raise self._full(f"they hold {self.bytes} bytes, the limit is {self._max_bytes}")
        if self.seconds > self._max_seconds:
            raise self._full(
                f"they wait for about {self.seconds:.0f} s, the limit is {self._max_seconds:g} s"
            )

    def enter(self, size: int, key: str = "") -> "Place":
        """The place of a call whose body, of `size` bytes, has arrived. Raises RequestError as
        `check` does."""
        self.check(key)
        place = Place(self, key)
        self._hold(place, size, choices=1)
        return place

    def admit(self, place: "Place", requests: list[Generate]) -> None:
        """The call of `place` is known to consist of these requests. Raises RequestError: 503, or
        400 if they could never run and wait."""
        choices = 0
        size = place.bytes
        for request in requests:
            n = request.sampling.n
            choices += n
            size += n * (_CHOICE_BYTES + _TOKEN_BYTES * num_ids(request.input_ids))
        if choices > self._max_choices:
            text = f"{choices} choices in one call; {self._max_choices} can run and wait"
            raise refusal("invalid_value", text)
        if place.key and choices > self._max_of_key:
            text = f"{choices} choices in one call; a key may have {self._max_of_key}"
            raise refusal("invalid_value", text)
        self._hold(place, size, choices)

    def leave(self, place: "Place") -> None:
        """What a call has held is free again."""
        self.bytes -= place.bytes
        self.choices -= place.choices
        if place.key:
            self._of_key[place.key] -= place.choices
            self._of_key += Counter()  # forgets those that have none
        place.bytes = 0
        place.choices = 0

    def _hold(self, place: "Place", size: int, choices: int) -> None:
        others = self.choices - place.choices
        other_bytes = self.bytes - place.bytes
        if others >= self._max_running and others + choices > self._max_choices:
            raise self._full(f"the limit is {self._max_choices} running and waiting together")
        if other_bytes and other_bytes + size > self._max_bytes:
            raise self._full(f"they hold {other_bytes} bytes, the limit is {self._max_bytes}")
        if place.key:
            of_key = self._of_key[place.key] - place.choices + choices
            if of_key > self._max_of_key:
                raise self._too_many_of_key()
            self._of_key[place.key] = of_key
        self.bytes = other_bytes + size
        self.choices = others + choices
        place.bytes = size
        place.choices = choices

    def _too_many_of_key(self) -> RequestError:
        return RequestError(
            status=429,
            code="rate_limit_exceeded",
            message=f"this key may have {self._max_of_key} open requests",
            retry_after=1,
        )

    def _full(self, why: str) -> RequestError:
        seconds = (1 + self.seconds) * random.uniform(1 - _JITTER, 1 + _JITTER)
        return RequestError(
            status=503,
            code="engine_overloaded",
            message=f"{self.choices} requests are open: {why}",
            retry_after=max(1, round(min(_LONGEST_RETRY, seconds))),
        )


class Place(AbstractContextManager["Place"]):
    """What one call, by the holder of `key` (Caller.key), holds of the queue's bounds, until its
    `with` block ends."""

    def __init__(self, admission: Admission, key: str) -> None:
        self._admission = admission
        self.key = key
        self.bytes = 0
        self.choices = 0

    def admit(self, requests: list[Generate]) -> None:
        """See `Admission.admit`."""
        self._admission.admit(self, requests)

    def __exit__(self, *exc: object) -> None:
        self._admission.leave(self)


class Speed:
    """How fast the engine works off requests, in tokens of prompts (cached ones too) and answers.

    Only time with open requests counts; the last half minute of it counts most."""

    _MEMORY = 30.0  # seconds
    _EVIDENCE = 2.0  # seconds of work before anything is told
    _MEAN_OVER = 64  # ended choices that the mean length is of

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None  # None: nothing is open
        self._length: float | None = None  # mean tokens of an answer

    def seconds(self, tokens: int) -> float:
        """The time that so much work takes; 0 while that is not known."""
        if self._seconds < self._EVIDENCE or self._tokens <= 0:
            return 0.0
        return tokens * self._seconds / self._tokens

    def expected(self, request: Generate) -> int:
        """The work of a request: its prompt, and its answers as long as others' have been."""
        length = request.sampling.max_new_tokens or 0
        if self._length is not None:
            length = min(length, round(self._length))
        return num_ids(request.input_ids) + request.sampling.n * length

    def begin(self, now: float) -> None:
        """A request is open; `now` as of time.perf_counter()."""
        if self._since is None:
            self._since = now

    def note(self, tokens: int, now: float) -> None:
        """So many tokens have been worked off since the last note."""
        if self._since is not None:
            elapsed = now - self._since
            fade = math.exp(-elapsed / self._MEMORY)
            self._tokens *= fade
            self._seconds = self._seconds * fade + elapsed
            self._since = now
        self._tokens += tokens

    def end(self) -> None:
        """Nothing is open any more."""
        self._since = None

    def note_answer(self, tokens: int) -> None:
        """A choice has ended with so many tokens."""
        if self._length is None:
            self._length = tokens
        self._length += (tokens - self._length) / self._MEAN_OVER
