"""GrammarChild: a process that works for this one, and is started again when it dies."""

# The compilers and the masker are children of the process that uses them, as the ranks of the
# engine are, so that `Engine` and the server have the same ones. They end when their end of the
# socket does. What is under way is kept on this side: a new process is told everything again.
# Whoever sends never waits: what a process does not take at once, its thread sends later.

import json
import logging
import os
import select
import socket
import subprocess
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from ..errors import RequestError
from ..spawn import start_process
from .frames import Frame, Hello, pack_frame, read_frame

MAX_DEATHS = 5  # within DEATH_WINDOW; then it is left alone until the oldest of them is forgotten
DEATH_WINDOW = 60.0  # seconds
SEND_TIMEOUT = 20.0  # seconds in which a process takes nothing, as it may while it starts
_CLOSE_SECONDS = 1.0  # that `close` waits
_END_SECONDS = 1.0  # for a process whose connection has ended
_TICK = 0.25  # seconds between two looks at what takes too long

log = logging.getLogger(__name__)


def unavailable() -> RequestError:
    """The error of requests that need a process which does not stay alive."""
    return RequestError(
        status=503,
        code="grammar_unavailable",
        message="constrained answers are not available now; others are",
        retry_after=30,
    )


class GrammarChild(ABC):
    """`module` and `title`: see start_process. `hello` is what the process is told first,
    `descriptors` it inherits, `options` are put on its standard input.

    A thread starts the process at the first `begin`, reads its frames, and starts it again. What
    subclasses keep of what is under way is theirs; the lock is held in all that they define."""

    def __init__(
        self,
        module: str,
        title: str,
        hello: Hello,
        *,
        descriptors: Sequence[int] = (),
        options: dict[str, int] | None = None,
    ) -> None:
        self._module = module
        self._title = title
        self._hello = hello
        self._descriptors = list(descriptors)
        self._options = options or {}
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None  # None: the process takes nothing now
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._closed = False
        self._unsent = bytearray()
        self._took_at = 0.0  # when the process took something last, while there is more
        self._has_unsent = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._has_unsent).atexit = False

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def begin(self) -> None:
        """Starts the process unless it runs; does not wait for it. Raises RequestError 503
        `grammar_unavailable` for one that keeps dying."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            if self._closed or self._dies_too_often():
                raise unavailable()
            self._thread = threading.Thread(target=self._run, name=self._title, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the process; whatever is under way fails. Idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._disconnect()
        if thread is not None:
            thread.join(_CLOSE_SECONDS)

    def _send(self, frame: Frame) -> None:
        """To the process, if there is one that takes frames; otherwise `_replay` tells it later.
        The caller holds the lock."""
        if self._socket is None:
            return
        if not self._unsent:
            self._took_at = time.monotonic()
        self._unsent += pack_frame(frame)
        self._send_unsent(self._socket)
        if self._unsent:
            os.eventfd_write(self._has_unsent, 1)

    def _send_unsent(self, connection: socket.socket) -> None:
        """As much as the process takes at once."""
        try:
            sent = connection.send(self._unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:  # it has died; the thread notices
            self._unsent.clear()
            return
        self._took_at = time.monotonic()
        del self._unsent[:sent]

    def _kill(self, reason: str) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            log.warning("%s (pid %d) is killed: %s", self._title, process.pid, reason)
            process.kill()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._socket = None

    def _dies_too_often(self) -> bool:
        deaths = self._deaths
        return len(deaths) == MAX_DEATHS and deaths[0] > time.monotonic() - DEATH_WINDOW

    # The thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            process, connection = self._start()
            try:
                self._serve(connection)
            except (EOFError, OSError):
                pass  # it has died, or `close` was called
            except Exception:  # a fault of ours or of what it says: nobody may wait for ever
                log.exception("the frames of %s (pid %d) fail", self._title, process.pid)
                process.kill()
            if self._closed:
                process.kill()  # it has nothing to finish, and may still be starting
            code = _end(process)
            with connection, self._lock:
                self._socket = None
                self._unsent.clear()
                if not self._closed:
                    log.warning("%s (pid %d) has ended with %d", self._title, process.pid, code)
                    self._deaths.append(time.monotonic())
                    self._lost()
                if self._closed or self._dies_too_often():
                    self._thread = None
                    self._give_up()
                    return

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_process(
                self._module, self._title, stdout=2, pass_fds=[theirs.fileno(), *self._descriptors]
            )
            options = {"socket": theirs.fileno(), **self._options}
        self._process = process
        assert process.stdin is not None
        process.stdin.write(json.dumps(options).encode() + b"\n")
        process.stdin.close()
        return process, ours

    def _serve(self, connection: socket.socket) -> None:
        """Tells the process everything, then hands on what it says. Raises EOFError, OSError."""
        connection.sendall(pack_frame(self._hello))
        with self._lock:
            if self._closed:
                return
            self._socket = connection
            self._replay()
        watched: list[socket.socket | int] = [connection, self._has_unsent]
        while True:
            sending = [connection] if self._unsent else []
            ready, _, _ = select.select(watched, sending, [], _TICK)
            with suppress(BlockingIOError):
                os.eventfd_read(self._has_unsent)
            frame = read_frame(connection) if connection in ready else None
            with self._lock:
                if self._unsent:
                    self._send_unsent(connection)
                    self._kill_if_stuck()
                if frame is not None:
                    self._take(frame)
                self._tick()

    def _kill_if_stuck(self) -> None:
        if self._unsent and time.monotonic() - self._took_at > SEND_TIMEOUT:
            self._unsent.clear()
            self._kill("it takes no messages")

    # Of the subclasses --------------------------------------------------------------------

    @abstractmethod
    def _replay(self) -> None:
        """Sends all that is under way."""

    @abstractmethod
    def _take(self, frame: Frame) -> None:
        """A frame of the process."""

    @abstractmethod
    def _lost(self) -> None:
        """The process has died with what is under way."""

    @abstractmethod
    def _give_up(self) -> None:
        """What is under way fails: the process dies too often, or was closed."""

    @abstractmethod
    def _tick(self) -> None:
        """Called often while the process lives."""


def _end(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that is about to end; one that is not is killed."""
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
