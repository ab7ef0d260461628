"""What every child of the supervisor does the same way: start, harden, connect, report, end."""

# The supervisor writes one `Launch` to the child's stdin, after it commands (to the API only), a
# line each; end of file on stdin means that the supervisor is gone. The child writes reports, a
# JSON array a line, to the status pipe.

import contextlib
import ctypes
import logging
import mmap
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import msgspec

from ..config import ServerArgs
from ..errors import EXIT_CLEAN, EXIT_CONFIG, EXIT_INTERNAL, ConfigError, EngineDeadError
from ..log import setup_logging
from .ipc import API, ROLES, SCHEDULER, Receiver, Sender

_STEP = len(ROLES)

Info = dict[str, float | int | str | None]

log = logging.getLogger(__name__)


class Heartbeats:
    """Shared memory that tells who is alive and whether steps move: a memfd (None: a new one) that
    children inherit."""

    # One page; each word of 8 bytes has one writer.
    # word 0..2    last beat of api, scheduler, detokenizer; CLOCK_MONOTONIC ns, 0 = not ready yet
    # word 3       ns for which the engine had not completed a step when the scheduler process last looked, 0: idle
    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("radix-heartbeats")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")

    def beat(self, role: str) -> None:
        self._words[ROLES.index(role)] = time.monotonic_ns()

    def stale(self, limit: float = 10.0) -> str | None:
        """The process that has been silent for longest since its first beat, if for more than
        `limit` seconds."""
        now = time.monotonic_ns()
        last = {role: self._words[i] or now for i, role in enumerate(ROLES)}
        worst = min(ROLES, key=lambda role: last[role])
        return worst if now - last[worst] > limit * 1e9 else None

    def watch_step(self, since: float | None) -> None:
        """When the engine last completed a step, None if idle. Beats for a loop that a step holds
        up."""
        self._words[_STEP] = 0 if since is None else int(1e9 * (time.monotonic() - since))
        if since is not None:
            self.beat(SCHEDULER)

    @property
    def step_seconds(self) -> float:
        return self._words[_STEP] / 1e9


class Launch(msgspec.Struct):
    """All that a child is told. Descriptors are inherited under the same numbers."""

    role: str
    args: ServerArgs
    directory: str
    token: bytes
    parent: int
    heartbeat_fd: int
    status_fd: int = -1
    listen_fd: int | None = None


class Child:
    def __init__(self, launch: Launch) -> None:
        self.launch, self.args = launch, launch.args
        self.heartbeats = Heartbeats(launch.heartbeat_fd)
        self._sigterms: list[int] = []

    def report(self, event: str, error: object = "", info: Info | None = None) -> None:
        """`ready` (info: for the API), `serving` (the API), `config` (the operator's mistake) or
        `fatal`."""
        report = event, " ".join(str(error).split())[:1000], info or {}
        with contextlib.suppress(OSError):  # the supervisor does not listen any more
            os.write(self.launch.status_fd, msgspec.json.encode(report) + b"\n")

    def beat(self) -> None:
        self.heartbeats.beat(self.launch.role)

    def connect(self) -> tuple[Receiver, Sender]:
        """The links of this process. But for the API, SIGTERM makes `should_stop` true and ends a
        wait for messages."""
        wake = (
            on_signals(self._sigterms.append, signal.SIGTERM) if self.launch.role != API else None
        )
        where = Path(self.launch.directory), self.launch.role, self.launch.token
        return Receiver(*where, wake), Sender(*where)

    def should_stop(self) -> bool:
        return bool(self._sigterms)


def on_signals(handler: Callable[[int], object], *numbers: signal.Signals) -> socket.socket:
    """Calls `handler` with the number of each signal; the returned socket is readable then."""
    sleeper, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(
        wake.detach(), warn_on_full_buffer=False
    )  # stays open as long as the process
    for number in numbers:
        signal.signal(number, lambda caught, _: handler(caught))
    return sleeper


def main() -> None:
    """Runs `serve` of the role's module. Never returns: 78 for an operator's mistake, else 70, and
    a report."""
    line = sys.stdin.buffer.readline()  # nothing follows it before this process has reported
    if not line:
        raise SystemExit(EXIT_INTERNAL)  # the supervisor died while this process started
    launch = msgspec.json.decode(line, type=Launch)
    _harden(launch)
    setup_logging(launch.role, launch.args.log_level)
    child, code = Child(launch), EXIT_INTERNAL
    try:
        import_module(f"radix_runtime.server.{launch.role}_process").serve(child)
        code = EXIT_CLEAN
    except ConfigError as error:
        child.report("config", error)
        code = EXIT_CONFIG
    except EngineDeadError as error:
        log.error("%s", error)
        child.report("fatal", error)
    except Exception as error:
        log.exception("unexpected error")
        child.report("fatal", f"{type(error).__name__}: {error}")
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # threads of libraries that are still at work must not delay or change the exit


def _harden(launch: Launch) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if os.getppid() != launch.parent:  # it died before the line above
        raise SystemExit(EXIT_INTERNAL)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor's business
    for descriptor in (launch.status_fd, launch.heartbeat_fd, launch.listen_fd):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
