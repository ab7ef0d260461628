"""How messages reach and leave the scheduler and the detokenizer, whatever carries them."""

import threading
from collections import deque
from typing import Protocol

from ..messages import Message


class Inbox(Protocol):
    def receive(self) -> list[Message]:
        """All messages that have arrived, in order; never blocks."""

    def wait(self, timeout: float | None) -> bool:
        """Sleeps until a message is there (True) or `timeout` seconds have passed (False)."""


class Outbox(Protocol):
    def send(self, message: Message) -> None:
        """Routes by type: TokenBatch to the detokenizer, the rest to the API."""


class LocalChannel:
    """Inbox and Outbox in one process, over a deque; any thread may send, one receives."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._arrived = threading.Event()

    def send(self, message: Message) -> None:
        self._messages.append(message)
        self._arrived.set()

    def receive(self) -> list[Message]:
        self._arrived.clear()
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def wait(self, timeout: float | None) -> bool:
        return self._arrived.wait(timeout)
