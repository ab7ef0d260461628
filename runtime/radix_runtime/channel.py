"""Where messages go and come from: the links of processes, or a deque within one."""

import threading
from collections import deque
from typing import Protocol

from .messages import Message


class Inbox(Protocol):
    """Where a process receives its messages."""

    def receive(self) -> list[Message]:
        """All messages that have arrived, in order; never blocks."""

    def wait(self, timeout: float | None) -> bool:
        """Sleeps until a message is there (True) or `timeout` seconds have passed (False)."""

    def wake(self) -> None:
        """Ends a `wait` of another thread."""


class Outbox(Protocol):
    """Where a process sends its messages."""

    def send(self, message: Message, instance: int = 0) -> None:
        """Hands it to where its type belongs: to this one of the processes of that role."""


class LocalChannel:
    """Inbox and Outbox within one process, over a deque. Any thread may send, one receives."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._arrived = threading.Event()

    def send(self, message: Message, instance: int = 0) -> None:
        """Appends a message and wakes the receiver, which is the only one: `instance` is 0."""
        assert instance == 0
        self._messages.append(message)
        self._arrived.set()

    def receive(self) -> list[Message]:
        """All messages that have arrived, in order; never blocks."""
        self._arrived.clear()
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def wait(self, timeout: float | None) -> bool:
        """Sleeps until a message is there (True) or `timeout` seconds have passed (False)."""
        return self._arrived.wait(timeout)

    def wake(self) -> None:
        """Inbox.wake."""
        self._arrived.set()
