"""What every child of the supervisor does the same way: start, report, harden, end.

The supervisor writes one `Launch` to the child's stdin, after it commands (lines, to the API only);
end of file on stdin means that the supervisor is gone. The child writes `Report`s, one JSON line
each, to the status pipe.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..config import ServerArgs
from ..errors import EXIT_CLEAN, EXIT_CONFIG, EXIT_INTERNAL, ConfigError, EngineDeadError
from ..log import setup_logging
from .heartbeat import Heartbeats

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_LENGTH = struct.Struct("<I")
DUMP_SIGNAL = signal.SIGUSR1  # prints the stacks of all threads

Info = dict[str, float | int | str | None]

log = logging.getLogger(__name__)


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

    def frame(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return _LENGTH.pack(len(body)) + body


class Report(msgspec.Struct):
    """`ready` (info: what the API should know), `serving` (the API only), `config` (message: what
    the operator must change) or `fatal` (message: why it ends)."""

    event: str
    message: str = ""
    info: Info = {}


class Child:
    """This process, as a child of the supervisor."""

    def __init__(self, launch: Launch) -> None:
        self.role = launch.role
        self.args = launch.args
        self.directory = Path(launch.directory)
        self.token = launch.token
        self.listen_fd = launch.listen_fd
        self.heartbeats = Heartbeats(launch.heartbeat_fd)
        self._status_fd = launch.status_fd
        self._stopping = False

    def report(self, report: Report) -> None:
        try:
            os.write(self._status_fd, msgspec.json.encode(report) + b"\n")
        except OSError:
            log.debug("the supervisor does not listen any more")

    def beat(self) -> None:
        self.heartbeats.beat(self.role)

    def stop_on_sigterm(self) -> socket.socket:
        """SIGTERM makes `should_stop` true and the returned socket readable."""
        wake, sleeper = socket.socketpair()
        wake.setblocking(False)
        self._wake = wake  # kept open
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        return sleeper

    def should_stop(self) -> bool:
        return self._stopping

    def _on_sigterm(self, signum: int, frame: object) -> None:
        self._stopping = True


def run_child(main: Callable[[Child], None]) -> None:
    """Body of a child's module: never returns. An operator's mistake becomes exit code 78, all
    else 70; the supervisor gets one line, the log the traceback."""
    launch = _read_launch()
    _harden(launch)
    setup_logging(launch.role, launch.args.log_level)
    child = Child(launch)
    code = EXIT_INTERNAL
    try:
        main(child)
        code = EXIT_CLEAN
    except ConfigError as error:
        child.report(Report("config", _one_line(error)))
        code = EXIT_CONFIG
    except EngineDeadError as error:
        log.error("%s", error)
        child.report(Report("fatal", _one_line(error)))
    except MemoryError:
        child.report(Report("fatal", "out of memory"))
    except Exception as error:
        log.exception("unexpected error")
        child.report(Report("fatal", f"{type(error).__name__}: {_one_line(error)}"))
    _leave(code)


def _leave(code: int) -> None:
    # Threads of libraries that are still at work must not delay or change the exit.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:1000]


def _read_launch() -> Launch:
    (size,) = _LENGTH.unpack(_read_exactly(_LENGTH.size))
    return msgspec.msgpack.decode(_read_exactly(size), type=Launch)


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            raise SystemExit(EXIT_INTERNAL)  # the supervisor died while this process started
        data += part
    return data


def _harden(launch: Launch) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.getppid() != launch.parent:  # it died before the line above
        raise SystemExit(EXIT_INTERNAL)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor's business
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    for descriptor in (launch.status_fd, launch.heartbeat_fd, launch.listen_fd):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
