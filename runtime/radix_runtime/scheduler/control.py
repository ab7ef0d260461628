"""Operations on the scheduler itself, by name: what `Control` messages ask for."""

from collections.abc import Callable

import msgspec

from ..errors import RequestError
from ..messages import Control, ControlError, ControlReply, pack_body

# Gets the body of the message; what it returns is the body of the reply.
Operation = Callable[[msgspec.Raw], object]


class Operations:
    """The operations that a process does for others, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Operation] = {}

    def register(self, name: str, operation: Operation) -> None:
        """Offers an operation. It may raise RequestError, or msgspec.DecodeError on a body that is
        not what it takes; everything else ends the process. Raises ValueError on a second one of
        the same name."""
        if name in self._by_name:
            raise ValueError(f"the operation {name!r} exists already")
        self._by_name[name] = operation

    def answer(self, message: Control) -> ControlReply:
        """Does what is asked; the reply has the result or the error."""
        operation = self._by_name.get(message.op)
        if operation is None:
            return _failure(message, 400, "unknown_operation", f"no operation {message.op!r}")
        try:
            return ControlReply(message.id, body=pack_body(operation(message.body)))
        except RequestError as error:
            return _failure(message, error.status, error.code, error.message)
        except msgspec.DecodeError as error:
            return _failure(message, 400, "invalid_value", f"{message.op}: {error}")


def _failure(message: Control, status: int, code: str, text: str) -> ControlReply:
    error = ControlError(status=status, code=code, message=text)
    return ControlReply(message.id, error=error)
