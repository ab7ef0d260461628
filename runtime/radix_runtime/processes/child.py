"""What every child of the supervisor does the same way: start, harden, connect, report, end."""

# The supervisor writes one `Launch` to the child's stdin and then, to those that serve HTTP,
# commands; a line each. End of file on stdin means that the supervisor is gone. The child writes
# reports, a JSON array a line, to the status pipe.

import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import msgspec

from ..config import ServerArgs
from ..errors import EXIT_CLEAN, EXIT_CONFIG, EXIT_INTERNAL, ConfigError, EngineDeadError
from ..log import setup_logging
from ..spawn import die_with_parent, leave
from .heartbeat import Heartbeats
from .ipc import Node, Receiver, Sender
from .roles import Role, Topology

_PR_SET_NO_NEW_PRIVS = 38  # from <linux/prctl.h>

_MAX_REPORT = 1000  # characters of an error in a report

Info = dict[str, float | int | str | None]

log = logging.getLogger(__name__)


class Launch(msgspec.Struct):
    """All that a child is told: its id, the roles of the instance, and the `generations` of the
    processes that were started again. Descriptors are inherited under the same numbers; who serves
    HTTP gets the listening socket, the numbers that it shares with others of its role, in which
    there are columns for `keys`, and `keys_digest`: of all keys, as `auth.keys_digest`."""

    process: str
    roles: list[Role]
    args: ServerArgs
    directory: str
    token: bytes
    parent: int
    heartbeat_fd: int
    generations: dict[str, int] = {}
    status_fd: int = -1
    listen_fd: int | None = None
    numbers_fd: int | None = None
    keys: list[str] = []
    keys_digest: str = ""

    @property
    def descriptors(self) -> list[int]:
        """Those that the child inherits."""
        given = [self.status_fd, self.heartbeat_fd]
        given += [each for each in (self.listen_fd, self.numbers_fd) if each is not None]
        return given


class Child:
    """This process, as a child of the supervisor: what it was told, and how it reports.

    `process` is its id, `role` what it does, `topology` says who else there is."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.args = launch.args
        self.process = launch.process
        self.topology = Topology(launch.roles)
        self.role = self.topology.role(launch.process)
        self.heartbeats = Heartbeats(self.topology.everybody(), launch.heartbeat_fd)
        self._sigterms: list[int] = []

    def report(self, event: str, error: object = "", info: Info | None = None) -> None:
        """Tells the supervisor `ready` (with `info` for the API), `serving` and `drained` (API
        processes only), `config` (the operator's mistake) or `fatal`."""
        message = " ".join(str(error).split())[:_MAX_REPORT]
        line = msgspec.json.encode((event, message, info or {})) + b"\n"
        with contextlib.suppress(OSError):  # the supervisor does not listen any more
            os.write(self.launch.status_fd, line)

    def beat(self) -> None:
        """This process is alive."""
        self.heartbeats.beat(self.process)

    def connect(self) -> tuple[Receiver, Sender]:
        """The links of this process. In all but API processes, SIGTERM makes `should_stop` true and
        ends a wait for messages."""
        node = Node(
            process=self.process,
            topology=self.topology,
            directory=Path(self.launch.directory),
            token=self.launch.token,
            generations=self.launch.generations,
        )
        wake = None
        if not self.role.serves_http:
            wake = on_signals(self._sigterms.append, signal.SIGTERM)
        sender = Sender(node, self.should_stop)
        return Receiver(node, wake, on_change=sender.follow), sender

    def should_stop(self) -> bool:
        """Whether the supervisor has asked this process to end."""
        return bool(self._sigterms)


def on_signals(handler: Callable[[int], object], *numbers: signal.Signals) -> socket.socket:
    """Calls `handler` with the number of each signal; the returned socket is readable then."""
    sleeper, wake = socket.socketpair()
    wake.setblocking(False)
    descriptor = wake.detach()  # stays open as long as the process
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda caught, _: handler(caught))
    return sleeper


def main() -> None:
    """Runs `serve` of its role's module. Never returns; exits with 78 and a report for an
    operator's mistake, with 70 and a report for everything else that goes wrong."""
    line = sys.stdin.buffer.readline()  # nothing follows it before this process has reported
    if not line:
        raise SystemExit(EXIT_INTERNAL)  # the supervisor died while this process started
    launch = msgspec.json.decode(line, type=Launch)
    _harden(launch)
    child = Child(launch)
    setup_logging(child.topology.label(child.process), launch.args.log_level)
    leave(_serve(child))


def _serve(child: Child) -> int:
    """The exit code, after the report that belongs to it."""
    try:
        import_module(child.role.module).serve(child)
    except ConfigError as error:
        child.report("config", error)
        return EXIT_CONFIG
    except EngineDeadError as error:
        log.error("%s", error)
        child.report("fatal", error)
        return EXIT_INTERNAL
    except Exception as error:
        log.exception("unexpected error")
        child.report("fatal", f"{type(error).__name__}: {error}")
        return EXIT_INTERNAL
    return EXIT_CLEAN


def _harden(launch: Launch) -> None:
    """Ends with the supervisor, gains no privileges, writes no core, leaves its files private and
    its descriptors to itself."""
    die_with_parent()
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.getppid() != launch.parent:  # it died before the first of these lines
        raise SystemExit(EXIT_INTERNAL)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for descriptor in launch.descriptors:
        os.set_inheritable(descriptor, False)
