"""The process that tries grammars: in forks of its own, which are killed at its limits."""

# A fork finds the vocabulary in memory, and serves one grammar after the other for as long as they
# behave: the first one costs it some milliseconds, to copy the pages that it writes. A kill costs
# nobody but the grammar that deserved it. An address-space limit would not do: stacks and arenas of
# threads count for it.

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..spawn import die_with_parent
from .backend import GrammarBackend
from .frames import Accepted, Compile, Frame, Hello, Refused, pack_frame, read_frame
from .registry import grammar_backends

# On few cores, running requests come before a grammar that takes long; most take some milliseconds,
# for which a client should not wait until the cores are idle.
NICENESS = 19
NICE_AFTER = 0.02  # seconds of CPU time
WALL_SECONDS = 5.0
MEMORY_BYTES = 1 << 30  # that a grammar may add to its fork
_MOST_GRAMMARS = 256  # of a fork
_MOST_BYTES = 128 << 20  # that a fork may keep beyond what it began with
_LOOK_SECONDS = 0.02  # between two looks at the forks
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

Verdict = Accepted | Refused


@dataclass(slots=True)
class _Fork:
    """A process that tries grammars. Of the one at work: its frame, when it was begun, and the CPU
    time and memory of the process by then."""

    pid: int
    connection: socket.socket
    first_memory: int
    served: int = 0
    is_nice: bool = False
    frame: Compile | None = None
    started: float = 0.0
    seconds: float = 0.0
    memory: int = 0

    def begin(self, frame: Compile) -> None:
        self.frame = frame
        self.started = time.monotonic()
        self.seconds, self.memory = _usage(self.pid)
        self.served += 1
        self.connection.sendall(pack_frame(frame))

    @property
    def job(self) -> int:
        """The number of the grammar at work."""
        assert self.frame is not None
        return self.frame.job

    @property
    def is_worn(self) -> bool:
        """Whether the next grammar should have a fork that is new."""
        grown = _usage(self.pid)[1] - self.first_memory
        return self.is_nice or self.served >= _MOST_GRAMMARS or grown > _MOST_BYTES

    def end(self) -> None:
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Tries:
    """The forks of this process: at most `slots` work at a time, the other grammars wait."""

    def __init__(self, backend: GrammarBackend, *, slots: int, cpu_seconds: float) -> None:
        self._backend = backend
        self._slots = slots
        self._cpu_seconds = cpu_seconds
        self._waiting: deque[Compile] = deque()
        self._idle: list[_Fork] = []
        self._busy: dict[int, _Fork] = {}  # by the descriptor of their connection
        self.selector = selectors.DefaultSelector()

    @property
    def is_busy(self) -> bool:
        """Whether there are forks to look at."""
        return bool(self._busy)

    def add(self, frame: Compile) -> None:
        """A grammar to try."""
        self._waiting.append(frame)
        self._fill_slots()

    def read(self, descriptor: int) -> Verdict | None:
        """The verdict of a fork that has something to say, or has died; None where its grammar is
        tried once more."""
        fork = self._busy[descriptor]
        try:
            verdict = read_frame(fork.connection)
        except (EOFError, OSError):
            return self._crashed(fork)
        assert isinstance(verdict, Verdict)
        if fork.is_worn:
            return self._end(fork, verdict)
        self._take_out(fork)
        self._idle.append(fork)
        self._fill_slots()
        return verdict

    def _crashed(self, fork: _Fork) -> Verdict | None:
        """Of a fork that died in its first grammar that one is the cause. An earlier one, or
        somebody's kill between two, may be that of another's."""
        if fork.served == 1:
            text = "the grammar is too complex: compiling it crashed"
            return self._end(fork, _too_complex(fork.job, text))
        frame = fork.frame
        assert frame is not None
        self._take_out(fork)
        fork.end()
        self._begin_in(self._fork(), frame)
        return None

    def enforce_limits(self) -> list[Verdict]:
        """Kills the forks that are past a limit; their verdicts."""
        verdicts: list[Verdict] = []
        for fork in list(self._busy.values()):
            reason = self._excess(fork)
            if reason is not None:
                text = f"the grammar is too complex: compiling it takes {reason}"
                verdicts.append(self._end(fork, _too_complex(fork.job, text)))
        return verdicts

    def _excess(self, fork: _Fork) -> str | None:
        seconds, memory = _usage(fork.pid)
        seconds -= fork.seconds
        if seconds >= NICE_AFTER and not fork.is_nice:
            os.setpriority(os.PRIO_PROCESS, fork.pid, NICENESS)
            fork.is_nice = True
        if seconds > self._cpu_seconds:
            return f"more than {self._cpu_seconds:g} s"
        if memory - fork.memory > MEMORY_BYTES:
            return f"more than {MEMORY_BYTES >> 30} GiB"
        if time.monotonic() - fork.started > WALL_SECONDS:
            return f"more than {WALL_SECONDS:g} s"
        return None

    def _take_out(self, fork: _Fork) -> None:
        self.selector.unregister(fork.connection)
        del self._busy[fork.connection.fileno()]

    def _end(self, fork: _Fork, verdict: Verdict) -> Verdict:
        self._take_out(fork)
        fork.end()
        self._fill_slots()
        return verdict

    def _fill_slots(self) -> None:
        while self._waiting and len(self._busy) < self._slots:
            self._begin(self._waiting.popleft())

    def _begin(self, frame: Compile) -> None:
        fork = self._idle.pop() if self._idle else self._fork()
        try:
            self._begin_in(fork, frame)
        except OSError:  # it has died meanwhile
            fork.end()
            self._begin_in(self._fork(), frame)

    def _begin_in(self, fork: _Fork, frame: Compile) -> None:
        fork.begin(frame)
        descriptor = fork.connection.fileno()
        self._busy[descriptor] = fork
        self.selector.register(fork.connection, selectors.EVENT_READ, descriptor)

    def _fork(self) -> _Fork:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _serve_grammars(self._backend, theirs, parent)
        theirs.close()
        return _Fork(pid=pid, connection=ours, first_memory=_usage(pid)[1])


def _serve_grammars(backend: GrammarBackend, connection: socket.socket, parent: int) -> None:
    """What a fork does; never returns."""
    try:
        die_with_parent()
        while os.getppid() == parent:
            frame = read_frame(connection)
            assert isinstance(frame, Compile)
            connection.sendall(pack_frame(_try(backend, frame)))
    finally:
        os._exit(1)


def _try(backend: GrammarBackend, frame: Compile) -> Frame:
    try:
        compiled = backend.compile(frame.constraint)
        return Accepted(frame.job, compiled.warnings)
    except RequestError as error:
        return Refused.of(frame.job, error)
    except (RecursionError, MemoryError):
        return _too_complex(frame.job, "the grammar is too complex: it is nested too deeply")


def _too_complex(job: int, text: str) -> Refused:
    return Refused(job, status=400, code="grammar_too_complex", message=text)


def _usage(pid: int) -> tuple[float, int]:
    """Seconds of CPU time and bytes of resident memory of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / _TICKS, int(fields[21]) * _PAGE


def main() -> None:
    """Answers until the process that uses this one has gone."""
    options: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    with socket.socket(fileno=options["socket"]) as connection:
        try:
            _serve(connection)
        except (EOFError, OSError):
            os._exit(0)


def _serve(connection: socket.socket) -> None:
    hello = read_frame(connection)
    assert isinstance(hello, Hello)
    backend = grammar_backends.get(hello.backend)(hello.vocabulary, 0)
    tries = Tries(backend, slots=hello.threads, cpu_seconds=hello.cpu_seconds)
    tries.selector.register(connection, selectors.EVENT_READ, None)
    while True:
        verdicts: list[Verdict] = []
        for key, _ in tries.selector.select(_LOOK_SECONDS if tries.is_busy else None):
            if key.data is None:
                frame = read_frame(connection)
                assert isinstance(frame, Compile)
                tries.add(frame)
            else:
                verdict = tries.read(key.data)
                if verdict is not None:
                    verdicts.append(verdict)
        verdicts += tries.enforce_limits()
        for verdict in verdicts:
            connection.sendall(pack_frame(verdict))
