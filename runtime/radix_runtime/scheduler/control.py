"""Operations on the scheduler itself, by name: what `Control` messages ask for."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from ..errors import EngineCommandError, RequestError, refusal
from ..messages import Control, ControlError, ControlReply, pack_body

# Gets the body of the message. What it returns is the body of the reply; a future of it, if the
# operation goes on while others are served.
Operation = Callable[[msgspec.Raw], object]


class Operations:
    """The operations that a process does for others, by name, and those that have not ended yet."""

    def __init__(self) -> None:
        self._by_name: dict[str, Operation] = {}
        self._open: deque[tuple[Control, Future[object]]] = deque()

    def __bool__(self) -> bool:
        """Whether a reply is still to come."""
        return bool(self._open)

    def register(self, name: str, operation: Operation) -> None:
        """Offers an operation. It, or its future, may raise RequestError, EngineCommandError, or
        msgspec.DecodeError on a body that is not what it takes; everything else ends the process.
        Raises ValueError on a second one of the same name."""
        if name in self._by_name:
            raise ValueError(f"the operation {name!r} exists already")
        self._by_name[name] = operation

    def answer(self, message: Control) -> ControlReply | None:
        """Does what is asked; the reply has the result or the error. None: it comes later, from
        `late_replies`."""
        operation = self._by_name.get(message.op)
        if operation is None:
            error = refusal("unknown_operation", f"no operation {message.op!r}")
            return _failure(message, error)
        try:
            result = operation(message.body)
        except _REFUSALS as error:
            return _failure(message, error)
        if isinstance(result, Future):
            self._open.append((message, result))
            return None
        return ControlReply(message.id, body=pack_body(result), api=message.api)

    def late_replies(self) -> list[ControlReply]:
        """The replies of operations that have ended since, in the order in which they began."""
        replies = []
        while self._open and self._open[0][1].done():
            message, future = self._open.popleft()
            try:
                body = pack_body(future.result())
                replies.append(ControlReply(message.id, body=body, api=message.api))
            except _REFUSALS as error:
                replies.append(_failure(message, error))
        return replies


_REFUSALS = (RequestError, EngineCommandError, msgspec.DecodeError)


def _failure(message: Control, error: Exception) -> ControlReply:
    match error:
        case RequestError():
            told = ControlError(status=error.status, code=error.code, message=error.message)
        case EngineCommandError():
            told = ControlError(status=500, code="engine_command_failed", message=str(error))
        case _:
            text = f"{message.op}: {error}"
            told = ControlError(status=400, code="invalid_value", message=text)
    return ControlReply(message.id, error=told, api=message.api)
