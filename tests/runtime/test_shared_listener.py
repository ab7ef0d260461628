"""A listening socket that several processes accept from: shares and errors of one of them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from radix_runtime.server import shared_listener
from radix_runtime.server.shared_listener import SharedListener
from radix_runtime.server.shared_numbers import CONNECTIONS, SharedNumbers


class Listener(socket.socket):
    """Accepts what has connected, after these errors."""

    errors: list[int]

    def accept(self) -> tuple[socket.socket, Any]:
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return super().accept()


class Rig:
    """One of two processes, whose other one has no connection and accepts none."""

    def __init__(self, errors: Sequence[int]) -> None:
        self.numbers = SharedNumbers(2, 0)
        self.made: list[asyncio.Protocol] = []
        self.waits: list[float] = []
        self.unhandled: list[Any] = []
        self.clients: list[socket.socket] = []
        self.listener = Listener()
        self.listener.errors = list(errors)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(64)

    def connect(self, count: int) -> None:
        address = self.listener.getsockname()
        self.clients += [socket.create_connection(address, timeout=20) for _ in range(count)]

    def make_protocol(self) -> asyncio.Protocol:
        self.made.append(asyncio.Protocol())
        return self.made[-1]

    async def accept(self, count: int) -> None:
        """Serves until there are so many connections, and a little longer."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.unhandled.append(context))
        served = _Counting(self)
        while len(self.made) < count:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        served.close()
        await served.wait_closed()

    def run(self, count: int) -> None:
        asyncio.run(asyncio.wait_for(self.accept(count), 30))
        assert len(self.made) == count and not self.unhandled


class _Counting(SharedListener):
    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        super().__init__(rig.listener, make_protocol=rig.make_protocol, numbers=rig.numbers)

    def _wait(self, seconds: float) -> None:
        self._rig.waits.append(seconds)
        super()._wait(seconds)


@contextmanager
def rig(*errors: int) -> Iterator[Rig]:
    rig = Rig(errors)
    yield rig
    for each in (rig.listener, *rig.clients):
        each.close()


def test_what_nobody_else_takes_is_taken_together() -> None:
    with rig() as process:
        process.numbers.publish(CONNECTIONS, 9)
        process.connect(16)
        process.run(16)
        assert process.waits == [shared_listener._MOMENT], "one for all of them"


def test_an_error_of_a_connection_is_not_the_listeners(caplog: pytest.LogCaptureFixture) -> None:
    errors = (errno.EPROTO, errno.EPERM, errno.EHOSTUNREACH, errno.ECONNABORTED, errno.ENETDOWN)
    with rig(*errors) as process:
        process.connect(3)
        process.run(3)
        assert process.waits == []
    assert not caplog.records


def test_no_files_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_listener, "_PAUSE", 0.01)
    with rig(*[errno.EMFILE] * 4) as process:
        process.connect(3)
        process.run(3)
        assert len(process.waits) == 4
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert [each.getMessage().rpartition(": ")[2] for each in warnings] == ["Too many open files"]
