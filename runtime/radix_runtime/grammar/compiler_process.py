"""The process that tries grammars: each in a fork of its own, which is killed at its limits."""

# The fork costs a millisecond and finds the vocabulary in memory; a kill costs nobody but the
# grammar that deserved it. An address-space limit would not do: stacks and arenas of threads count
# for it.

import ctypes
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

import msgspec

from ..errors import RequestError
from .backend import GrammarBackend
from .frames import Accepted, Compile, Hello, Refused, pack_frame, read_frame
from .registry import grammar_backends

NICENESS = 19  # on few cores, running requests come before new grammars
WALL_SECONDS = 5.0
MEMORY_BYTES = 1 << 30  # that a fork may add to what it began with
_LOOK_SECONDS = 0.02  # between two looks at the forks
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG = 1

Verdict = Accepted | Refused
_decode = msgspec.msgpack.Decoder(Verdict).decode


@dataclass(slots=True)
class _Fork:
    """A grammar that is being tried. `output` is the read end of its pipe."""

    job: int
    pid: int
    output: int
    started: float
    data: bytes = b""


class Tries:
    """The forks of this process: at most `slots` at a time, the other grammars wait."""

    def __init__(self, backend: GrammarBackend, *, slots: int, cpu_seconds: float) -> None:
        self._backend = backend
        self._slots = slots
        self._cpu_seconds = cpu_seconds
        self._own_memory = 0
        self._waiting: deque[Compile] = deque()
        self._forks: dict[int, _Fork] = {}  # by output
        self.selector = selectors.DefaultSelector()

    @property
    def is_busy(self) -> bool:
        """Whether there are forks to look at."""
        return bool(self._forks)

    def add(self, frame: Compile) -> None:
        """A grammar to try."""
        self._waiting.append(frame)
        self._fill_slots()

    def read(self, output: int) -> Verdict | None:
        """Reads what a fork has written; its verdict, if that was all of it."""
        fork = self._forks[output]
        data = os.read(output, 1 << 16)
        if data:
            fork.data += data
            return None
        if not fork.data:
            text = "the grammar is too complex: compiling it crashed"
            return self._end(fork, _too_complex(fork.job, text))
        return self._end(fork, _decode(fork.data))

    def enforce_limits(self) -> list[Verdict]:
        """Kills the forks that are past a limit; their verdicts."""
        verdicts = []
        for fork in list(self._forks.values()):
            reason = self._excess(fork)
            if reason is not None:
                os.kill(fork.pid, signal.SIGKILL)
                text = f"the grammar is too complex: compiling it takes {reason}"
                verdicts.append(self._end(fork, _too_complex(fork.job, text)))
        return verdicts

    def _excess(self, fork: _Fork) -> str | None:
        seconds, memory = _usage(fork.pid)
        if seconds > self._cpu_seconds:
            return f"more than {self._cpu_seconds:g} s"
        if memory - self._own_memory > MEMORY_BYTES:
            return f"more than {MEMORY_BYTES >> 30} GiB"
        if time.monotonic() - fork.started > WALL_SECONDS:
            return f"more than {WALL_SECONDS:g} s"
        return None

    def _end(self, fork: _Fork, verdict: Verdict) -> Verdict:
        self.selector.unregister(fork.output)
        os.close(fork.output)
        os.waitpid(fork.pid, 0)
        del self._forks[fork.output]
        self._fill_slots()
        return verdict

    def _fill_slots(self) -> None:
        while self._waiting and len(self._forks) < self._slots:
            self._fork(self._waiting.popleft())

    def _fork(self, frame: Compile) -> None:
        output, written = os.pipe()
        self._own_memory = _usage(os.getpid())[1]
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _try(self._backend, frame, written, parent)
        os.close(written)
        self._forks[output] = _Fork(job=frame.job, pid=pid, output=output, started=time.monotonic())
        self.selector.register(output, selectors.EVENT_READ, output)


def _try(backend: GrammarBackend, frame: Compile, output: int, parent: int) -> None:
    """What a fork does; never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    try:
        compiled = backend.compile(frame.constraint)
        verdict: Verdict = Accepted(frame.job, compiled.warnings)
    except RequestError as error:
        verdict = Refused.of(frame.job, error)
    except (RecursionError, MemoryError):
        verdict = _too_complex(frame.job, "the grammar is too complex: it is nested too deeply")
    try:
        os.write(output, msgspec.msgpack.encode(verdict))
    finally:
        os._exit(0)


def _too_complex(job: int, text: str) -> Refused:
    return Refused(job, status=400, code="grammar_too_complex", message=text)


def _usage(pid: int) -> tuple[float, int]:
    """Seconds of CPU time and bytes of resident memory of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / _TICKS, int(fields[21]) * _PAGE


def main() -> None:
    """Answers until the process that uses this one has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its business
    options: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    os.nice(NICENESS)
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
