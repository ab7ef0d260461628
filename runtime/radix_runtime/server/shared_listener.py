"""A listening socket that several API processes accept from, each its share."""

# All processes inherit one socket with one backlog. A connection waits there until some process
# takes it: none is lost or delayed by a process that is busy or dead, as it would be where each has
# a socket of its own (SO_REUSEPORT), and a second server on the port is an error as ever. The
# kernel wakes all of them, and whoever comes first would take it; to share connections evenly, a
# process that has more of them than another first gives that one a head start of a moment.

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

import uvicorn

from .shared_numbers import CONNECTIONS, SharedNumbers

_MOMENT = 0.002  # seconds that a process with more connections waits for one with fewer
_SHARE = 16  # connections that it takes at most when nobody has taken them meanwhile
_PAUSE = 1.0  # seconds, when the machine lets this process accept none
# Errors of one connection, of which accept(2) tells as if they were the listener's.
_OF_CONNECTION = (
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENONET,
    errno.ENOPROTOOPT,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EPROTO,
)

log = logging.getLogger(__name__)


class SharedListener:
    """Accepts connections and gives each to a protocol of `make_protocol`. The count of this
    process is kept by the protocols, in `numbers`."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        numbers: SharedNumbers,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._numbers = numbers
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._has_failed = False  # since the last connection
        self._tasks: set[asyncio.Task[object]] = set()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._on_readable)

    def _on_readable(self) -> None:
        if self._numbers.is_ahead(CONNECTIONS):
            self._wait(_MOMENT)
        else:
            self._accept(most=1)

    def _wait(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._on_readable)
        self._accept(most=_SHARE)

    def _accept(self, most: int) -> None:
        """Takes so many connections at most of those that wait."""
        for _ in range(most):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return  # other processes have the rest
            except OSError as error:
                self._failed(error)
                return
            self._has_failed = False
            self._serve(connection)

    def _failed(self, error: OSError) -> None:
        """Goes on, at once or, where the next attempt would fail too, in a while."""
        if error.errno in _OF_CONNECTION:
            return
        if not self._has_failed:  # else it has been said
            log.warning("no connection can be accepted, which is tried again: %s", error.strerror)
        self._has_failed = True
        self._wait(_PAUSE)

    def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        made = self._loop.connect_accepted_socket(self._make_protocol, connection)
        task = self._loop.create_task(made)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Accepts no more. As in asyncio.Server."""
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """As in asyncio.Server."""


class SharingServer(uvicorn.Server):
    """uvicorn's server on a listening socket that it shares with other processes."""

    def __init__(self, config: uvicorn.Config, numbers: SharedNumbers) -> None:
        super().__init__(config)
        self._numbers = numbers

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections from `sockets`."""
        await super().startup(sockets=[])

        def make_protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        listeners = [
            SharedListener(each, make_protocol=make_protocol, numbers=self._numbers)
            for each in sockets or []
        ]
        self.servers = listeners  # type: ignore[assignment] # all that uvicorn does is end them
