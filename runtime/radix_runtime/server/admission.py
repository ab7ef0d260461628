"""Admission: whether another call may join those that wait, told before its prompt is tokenized."""

import math
import random
from collections import Counter
from contextlib import AbstractContextManager

from ..config import ServerArgs
from ..errors import RequestError, refusal
from ..messages import Generate, num_ids
from .shared_numbers import (
    BYTES,
    CHOICES,
    DONE_TOKENS,
    SPEED_MILLISECONDS,
    SPEED_TOKENS,
    WAITING_TOKENS,
    SharedNumbers,
)

_CHOICE_BYTES = 16 << 10  # what a choice holds in all processes beside its tokens, about
_TOKEN_BYTES = 4
_LONGEST_RETRY = 30.0  # seconds
_JITTER = 0.2  # share by which Retry-After varies, so that clients do not come back together


class Admission:
    """The bounds of the queue: bytes that calls hold, seconds of work that waits, and, where it was
    given, a count. A call is let in as a whole, and always where nobody waits. Belongs to the event
    loop's thread.

    The bounds hold for all API processes of the server together: each tells the others in `numbers`
    what its calls hold. `bytes`, `choices` and `waiting_tokens`, the work of the requests that have
    not had their first token, are those of this process."""

    def __init__(self, args: ServerArgs, numbers: SharedNumbers) -> None:
        self._numbers = numbers
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
        self._done_tokens = 0
        self._done_elsewhere = 0  # when this process last looked

    def set_running(self, count: int) -> None:
        """So many requests run at a time."""
        self._max_running = count
        self._max_choices = count + self._max_queued

    @property
    def seconds(self) -> float:
        """How long a new request would wait, as far as that is known: by the speed that this
        process has seen or, while it has not seen enough, by what the others have."""
        waiting = self.waiting_tokens + self._numbers.elsewhere(WAITING_TOKENS)
        if self.speed.is_known:
            return self.speed.seconds(waiting)
        tokens = self._numbers.elsewhere(SPEED_TOKENS)
        seconds = self._numbers.elsewhere(SPEED_MILLISECONDS) / 1000
        return Speed(tokens, seconds).seconds(waiting)

    @property
    def all_bytes(self) -> int:
        """What the calls of all processes hold."""
        return self.bytes + self._numbers.elsewhere(BYTES)

    @property
    def all_choices(self) -> int:
        """The choices that the calls of all processes hold."""
        return self.choices + self._numbers.elsewhere(CHOICES)

    def _of_key_everywhere(self, key: str) -> int:
        return self._of_key[key] + self._numbers.elsewhere_of_key(key)

    def check(self, key: str = "") -> None:
        """Raises RequestError 503, or 429 for this `key` (Caller.key), if no further call may join.
        Cheap: asked before the body is read."""
        if key and self._of_key_everywhere(key) >= self._max_of_key:
            raise self._too_many_of_key()
        choices = self.all_choices  # read once, as others write them
        size = self.all_bytes
        seconds = self.seconds
        if choices >= self._max_choices:
            text = f"the limit is {self._max_choices} running and waiting together"
            raise self._full(text, choices)
        if size >= self._max_bytes:
            raise self._full(f"they hold {size} bytes, the limit is {self._max_bytes}", choices)
        if seconds > self._max_seconds:
            text = f"they wait for about {seconds:.0f} s, the limit is {self._max_seconds:g} s"
            raise self._full(text, choices)

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
        self._set(place, 0, 0)
        if place.key:
            self._of_key += Counter()  # forgets those that have none

    def _hold(self, place: "Place", size: int, choices: int) -> None:
        """Lets `place` have so much in place of what it has. Raises RequestError, and it keeps what
        it has."""
        before = place.bytes, place.choices
        self._set(place, size, choices)  # first, so that other processes see it when this one looks
        try:
            self._check_fits(place)
        except RequestError:
            self._set(place, *before)
            raise

    def _set(self, place: "Place", size: int, choices: int) -> None:
        self.bytes += size - place.bytes
        self.choices += choices - place.choices
        self._numbers.publish(BYTES, self.bytes)
        self._numbers.publish(CHOICES, self.choices)
        if place.key:
            self._of_key[place.key] += choices - place.choices
            self._numbers.publish_key(place.key, self._of_key[place.key])
        place.bytes = size
        place.choices = choices

    def _check_fits(self, place: "Place") -> None:
        """Raises RequestError if what `place` has is too much beside the others."""
        choices = self.all_choices
        others = choices - place.choices
        if others >= self._max_running and choices > self._max_choices:
            text = f"the limit is {self._max_choices} running and waiting together"
            raise self._full(text, others)
        size = self.all_bytes
        if size > place.bytes and size > self._max_bytes:
            held = size - place.bytes
            raise self._full(f"they hold {held} bytes, the limit is {self._max_bytes}", others)
        if place.key and self._of_key_everywhere(place.key) > self._max_of_key:
            raise self._too_many_of_key()

    # The work that waits ------------------------------------------------------------------

    def begin_work(self, tokens: int, now: float) -> None:
        """A request with so much work waits; `now` as of time.perf_counter()."""
        self.waiting_tokens += tokens
        self._numbers.publish(WAITING_TOKENS, self.waiting_tokens)
        if self.speed.begin(now):
            self._done_elsewhere = self._numbers.elsewhere(DONE_TOKENS)

    def end_wait(self, tokens: int) -> None:
        """It waits no longer."""
        self.waiting_tokens -= tokens
        self._numbers.publish(WAITING_TOKENS, self.waiting_tokens)

    def note_work(self, tokens: int, now: float) -> None:
        """So many tokens of work have been done for this process. The engine's speed is that of its
        work for all processes, in the time in which this one has open requests."""
        self._done_tokens += tokens
        self._numbers.publish(DONE_TOKENS, self._done_tokens)
        if self.speed.is_running:
            elsewhere = self._numbers.elsewhere(DONE_TOKENS)
            tokens += elsewhere - self._done_elsewhere
            self._done_elsewhere = elsewhere
        self.speed.note(tokens, now)
        self._numbers.publish(SPEED_TOKENS, round(self.speed.tokens))
        self._numbers.publish(SPEED_MILLISECONDS, round(1000 * self.speed.elapsed))

    def pause(self, now: float) -> None:
        """Nothing is open in this process any more. What was done for its last requests is noted
        behind this; the time that it took is counted here."""
        self.note_work(0, now)
        self.speed.end()

    def _too_many_of_key(self) -> RequestError:
        return RequestError(
            status=429,
            code="rate_limit_exceeded",
            message=f"this key may have {self._max_of_key} open requests",
            retry_after=1,
        )

    def _full(self, why: str, choices: int) -> RequestError:
        """So many choices are open."""
        seconds = (1 + self.seconds) * random.uniform(1 - _JITTER, 1 + _JITTER)
        return RequestError(
            status=503,
            code="engine_overloaded",
            message=f"{choices} requests are open: {why}",
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

    def __init__(self, tokens: float = 0.0, elapsed: float = 0.0) -> None:
        """So many `tokens` have been worked off in `elapsed` seconds."""
        self.tokens = tokens
        self.elapsed = elapsed
        self._since: float | None = None  # None: nothing is open
        self._length: float | None = None  # mean tokens of an answer

    @property
    def is_running(self) -> bool:
        """Whether time counts."""
        return self._since is not None

    @property
    def is_known(self) -> bool:
        """Whether there has been enough work to tell."""
        return self.elapsed >= self._EVIDENCE and self.tokens > 0

    def seconds(self, tokens: int) -> float:
        """The time that so much work takes; 0 while that is not known."""
        return tokens * self.elapsed / self.tokens if self.is_known else 0.0

    def expected(self, request: Generate) -> int:
        """The work of a request: its prompt, and its answers as long as others' have been."""
        length = request.sampling.max_new_tokens or 0
        if self._length is not None:
            length = min(length, round(self._length))
        return num_ids(request.input_ids) + request.sampling.n * length

    def begin(self, now: float) -> bool:
        """A request is open; `now` as of time.perf_counter(). True if none was before."""
        is_first = self._since is None
        if is_first:
            self._since = now
        return is_first

    def note(self, tokens: int, now: float) -> None:
        """So many tokens have been worked off since the last note."""
        if self._since is not None:
            elapsed = now - self._since
            fade = math.exp(-elapsed / self._MEMORY)
            self.tokens *= fade
            self.elapsed = self.elapsed * fade + elapsed
            self._since = now
        self.tokens += tokens

    def end(self) -> None:
        """Nothing is open any more."""
        self._since = None

    def note_answer(self, tokens: int) -> None:
        """A choice has ended with so many tokens."""
        if self._length is None:
            self._length = tokens
        self._length += (tokens - self._length) / self._MEAN_OVER
