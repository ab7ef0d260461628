"""How fast large request bodies are read: one piece after the other, with a pause between two."""

# To read a piece of a body is short, but a body that arrives as fast as it is read takes the core
# again and again, and on a machine whose cores are busy the processes that make tokens then wait
# for the operating system to end its time slice.

import asyncio
from collections import deque

from uvicorn.protocols.http.flow_control import FlowControl

FREE_BYTES = 64 << 10  # of a body are read as they come
_PAUSE = 0.001  # seconds between two pieces, of whichever connections


class Turns:
    """The connections that wait to read another piece of a large body: all of a process, so that
    many of them take no more of its time than one. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: deque[PacedFlow] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, flow: "PacedFlow") -> None:
        """Has `flow` read after those that wait already."""
        self._waiting.append(flow)
        if self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_PAUSE, self._next)

    def _next(self) -> None:
        self._timer = None
        while self._waiting:
            if self._waiting.popleft().take_turn():
                break
        if self._waiting:
            self._start_timer()


class PacedFlow(FlowControl):
    """uvicorn's flow control of one connection, which can also wait for its turn to read."""

    def __init__(self, transport: asyncio.Transport, turns: Turns) -> None:
        super().__init__(transport)
        self._turns = turns
        self._needs_turn = False
        self._is_waiting = False

    def pause_until_turn(self) -> None:
        """Reads nothing until `resume_reading` has been called and its turn has come."""
        self._needs_turn = True
        self.pause_reading()

    def resume_reading(self) -> None:
        """Reads on, now or when it is its turn."""
        if not self._needs_turn:
            super().resume_reading()
        elif not self._is_waiting:
            self._is_waiting = True
            self._turns.wait(self)

    def take_turn(self) -> bool:
        """Reads on. False if the connection has ended meanwhile."""
        self._is_waiting = False
        self._needs_turn = False
        if self._transport.is_closing():
            return False
        super().resume_reading()
        return True
