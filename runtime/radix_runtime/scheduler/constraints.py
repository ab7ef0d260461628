"""The masks of constrained answers: asked of the masker once the tokens before them are known."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, NamedTuple, Protocol

from ..constraint import Constraint
from ..errors import RequestError, refusal
from ..step_plan import StepMasks, StepPlan
from .request import Request
from .rows import Rows

log = logging.getLogger(__name__)

OnFailure = Callable[[int, RequestError], None]


class Masks(Protocol):
    """The masker as the scheduler sees it; see grammar/masker.py."""

    def begin(self) -> None: ...

    def open(
        self, number: int, constraint: Constraint, *, stop_ids: Sequence[int], min_tokens: int
    ) -> Future[None]: ...

    def close_answers(self, numbers: Sequence[int]) -> None: ...

    def take_free(self) -> list[int]: ...

    def promise(self, size: int, num_optional: int) -> StepMasks: ...

    def fill(self, masks: Any, tokens: Mapping[int, tuple[int, list[int]]]) -> None: ...


# Makes the masker, which calls `on_failure` from another thread, and `wake` when it has news.
MakeMasks = Callable[[OnFailure, Callable[[], None]], Masks]


class _Awaited(NamedTuple):
    """The masks of a launched step, which cannot be asked for yet."""

    plan: StepPlan
    requests: list[Request]
    masks: StepMasks


class ConstrainedAnswers:
    """Knows every live request that needs masks, by the number under which the masker has it.

    The masks of a step need the tokens of the step before, which may be in flight when the step is
    launched. So `launch` promises them, and `ask` asks for them when that step has completed: they
    are computed while the model runs. An answer whose mask was late has no new tokens then, and the
    mask that is under way serves the next step. Used by the scheduler's thread."""

    def __init__(self, make: MakeMasks | None, wake: Callable[[], None]) -> None:
        self._make = make
        self._wake = wake
        self._masks: Masks | None = None
        self._numbers = count(1)
        self._by_request: dict[Request, int] = {}
        self._known: dict[Request, int] = {}  # output tokens that the masker has been told
        self._failures: deque[tuple[int, RequestError]] = deque()
        self._awaited: deque[_Awaited] = deque()

    def hold(self, request: Request) -> Future[None] | None:
        """Intake.hold: until the grammar of the request is compiled."""
        constraint = request.source.constraint
        if constraint is None:
            return None
        try:
            built = self._open(request, constraint)
        except RequestError as error:
            built = Future()
            built.set_exception(error)
        if built.done() and built.exception() is None:
            return None
        return built

    def start(self) -> Masks:
        """The masker, which is started if it is not there. Raises RequestError."""
        if self._masks is None:
            if self._make is None:
                raise refusal("unsupported_parameter", "answers cannot be constrained here")
            self._masks = self._make(self._failed, self._wake)
        self._masks.begin()
        return self._masks

    def _open(self, request: Request, constraint: Constraint) -> Future[None]:
        masks = self.start()
        number = next(self._numbers)
        self._by_request[request] = number
        self._known[request] = 0
        return masks.open(
            number,
            constraint,
            stop_ids=sorted(request.stop_ids),
            min_tokens=request.params.min_new_tokens,
        )

    def _failed(self, number: int, error: RequestError) -> None:
        self._failures.append((number, error))  # on another thread
        self._wake()

    def launch(self, plan: StepPlan, rows: Rows) -> StepMasks | None:
        """The masks of a step; None if it draws for no constrained answer."""
        if not self._by_request:
            return None
        requests = [rows.request(row) for row in plan.rows.tolist()]
        draws = zip(requests, plan.num_samples.tolist(), strict=True)
        if not any(drawn and request in self._by_request for request, drawn in draws):
            return None
        assert self._masks is not None
        size = int(plan.num_samples.sum())
        num_optional = int(plan.num_samples[: plan.num_decode].sum())
        masks = self._masks.promise(size, num_optional)
        self._awaited.append(_Awaited(plan=plan, requests=requests, masks=masks))
        return masks

    def ask(self, completed_step: int) -> None:
        """Asks for the masks of the steps whose tokens before are all known."""
        while self._awaited and self._awaited[0].plan.step_id <= completed_step + 1:
            self._ask(self._awaited.popleft())

    def _ask(self, awaited: _Awaited) -> None:
        tokens: dict[int, tuple[int, list[int]]] = {}
        size = 0
        counts = awaited.plan.num_samples.tolist()
        for request, num_samples in zip(awaited.requests, counts, strict=True):
            number = self._by_request.get(request)
            if num_samples and number is not None and not request.ended:
                new = request.ids[request.prompt_len + self._known[request] :]
                tokens[number] = (size, new.tolist())
                self._known[request] = request.num_output
            size += num_samples
        assert self._masks is not None
        self._masks.fill(awaited.masks, tokens)

    def take_failures(self) -> list[tuple[Request, RequestError]]:
        """The requests that cannot go on, and why. Their draws meanwhile were not constrained."""
        if not self._failures:
            return []
        by_number = {number: request for request, number in self._by_request.items()}
        failures = []
        while self._failures:
            number, error = self._failures.popleft()
            request = by_number.get(number)
            if request is not None and not request.ended:
                failures.append((request, error))
        return failures

    def forget_ended(self) -> None:
        """Closes the matchers of the requests that have ended, and of those that go on without:
        a reasoning budget asks for nothing behind the reasoning."""
        if self._masks is None:
            return
        free = set(self._masks.take_free())
        by_request = self._by_request.items()
        ended = [request for request, number in by_request if request.ended or number in free]
        if ended:
            self._masks.close_answers([self._by_request.pop(request) for request in ended])
            for request in ended:
                del self._known[request]
