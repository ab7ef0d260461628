"""Operations on the scheduler and its engine that are no requests."""

from collections import deque
from concurrent.futures import Future

from ..errors import EngineCommandError
from ..messages import ControlReply, Outbox
from ..step_plan import EngineCommand, Executor


class Controls:
    """Commands that the engine has not answered yet, in their order. Each is answered to whoever
    sent it: `ok` with a line for each rank, or the error of the rank that failed."""

    def __init__(self, executor: Executor, outbox: Outbox) -> None:
        self._executor = executor
        self._outbox = outbox
        self._calls: deque[tuple[int, Future[list[str]]]] = deque()

    def __bool__(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._calls)

    def call(self, number: int, command: EngineCommand | None) -> None:
        """Has the engine execute `command` behind the steps launched so far. `number` is the id of
        the Control that asked for it."""
        if command is None:
            self._outbox.send(ControlReply(number, ok=False, error="there is no command"))
            return
        self._calls.append((number, self._executor.call(command)))

    def answer(self) -> bool:
        """Sends the answers that are there; True if there were any. Raises EngineDeadError."""
        answered = False
        while self._calls and self._calls[0][1].done():
            number, future = self._calls.popleft()
            self._outbox.send(_reply(number, future))
            answered = True
        return answered


def _reply(number: int, future: Future[list[str]]) -> ControlReply:
    try:
        return ControlReply(number, ok=True, answers=future.result())
    except EngineCommandError as error:
        return ControlReply(number, ok=False, error=str(error))
