"""The supervisor of `radix serve`: starts the processes, watches them, ends them together
(docs/serving.md: when)."""

# Nothing polls: the loop sleeps on exits, status pipes and signals, and reads heartbeats each
# second from the start.

import contextlib
import errno
import logging
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import msgspec

from ..config import ServerArgs
from ..errors import EXIT_CLEAN, EXIT_HANG, EXIT_INTERNAL, ConfigError
from ..processes import DUMP_SIGNAL, start_process
from .child import Heartbeats, Info, Launch, on_signals
from .ipc import API, DETOKENIZER, SCHEDULER, TOKEN_BYTES

_JANITOR = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
_TICK = 1.0  # seconds between two looks at the heartbeats
_GRACE = 2.5  # seconds that children have to end by themselves
WRITE_STALL = 30.0  # seconds that a client may read nothing, or be silent, while bytes wait for it

log = logging.getLogger(__name__)


class ChildProcess:
    """A child and its process group. Only `close` reaps it: until then its pid can mean nobody
    else."""

    def __init__(self, launch: Launch) -> None:
        self.role = launch.role
        self.status, launch.status_fd = os.pipe()
        inherited = [
            fd for fd in (launch.status_fd, launch.heartbeat_fd, launch.listen_fd) if fd is not None
        ]
        module, name = "radix_runtime.server.child", f"{launch.role}_process"
        self._popen = start_process(
            module, name, bufsize=0, pass_fds=inherited, start_new_session=True
        )
        os.close(launch.status_fd)
        self.pid = self._popen.pid
        self.exit_descriptor = os.pidfd_open(self.pid)
        self.running, self.ready, self.reason, self.unread = True, False, "", b""
        self.write(msgspec.json.encode(launch))

    def write(self, line: bytes) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # it does not read; its exit tells the rest
            self._popen.stdin.write(line + b"\n")

    def exit_text(self) -> str:
        """How it ended, for a person. Only after `exit_descriptor` became readable."""
        self.running = False
        result = os.waitid(os.P_PIDFD, self.exit_descriptor, os.WEXITED | os.WNOWAIT)
        assert result is not None
        how = f"exited with code {result.si_status}"
        if result.si_code != os.CLD_EXITED:
            how = f"was killed by {signal.Signals(result.si_status).name}"
        return f"the {self.role} process {how}" + (f": {self.reason}" if self.reason else "")

    def close(self) -> None:
        """Kills what is left of it and of what it has started, and reaps it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._popen.wait(5.0)  # the kernel's seconds to end a killed process
        except subprocess.TimeoutExpired:
            log.error("process %d (%s) survives SIGKILL", self.pid, self.role)


class Supervisor:
    """One serving instance. The caller binds `listener`, so that a port in use is known first of
    all."""

    def __init__(self, args: ServerArgs, listener: socket.socket) -> None:
        self._args, self._listener = args, listener
        host, port = listener.getsockname()[:2]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._heartbeats = Heartbeats()
        self._selector = selectors.DefaultSelector()  # the data of an entry is what to call
        self._children: dict[str, ChildProcess] = {}
        self._info: Info = {}
        self._serving = False
        self._signals: list[int] = []
        self._verdict: tuple[int, str] | None = None  # exit code and reason, once decided

    def run(self) -> int:
        """Serves until a signal or a failure; the exit code. Main thread only. Raises a child's
        ConfigError."""
        wake = on_signals(self._signals.append, signal.SIGTERM, signal.SIGINT)
        self._selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(64))
        with private_directory() as directory:
            same = (
                self._args,
                directory,
                secrets.token_bytes(TOKEN_BYTES),
                os.getpid(),
                self._heartbeats.descriptor,
            )
            try:
                self._start(Launch(DETOKENIZER, *same))
                self._start(Launch(SCHEDULER, *same))
                self._start(Launch(API, *same, listen_fd=self._listener.fileno()))
                self._listener.close()  # an API that dies must not leave clients in its backlog
                while self._verdict is None:
                    self._dispatch(_TICK)
                    self._look()
                return self._end(*self._verdict)
            finally:
                for child in self._children.values():
                    child.close()

    def _start(self, launch: Launch) -> None:
        child = self._children[launch.role] = ChildProcess(launch)
        self._selector.register(
            child.status, selectors.EVENT_READ, lambda: self._read_reports(child)
        )
        self._selector.register(
            child.exit_descriptor, selectors.EVENT_READ, lambda: self._child_exited(child)
        )

    def _dispatch(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()

    def _decide(self, code: int, reason: str) -> None:
        self._verdict = self._verdict or (code, reason)

    def _look(self) -> None:
        limit = self._args.step_timeout
        if self._signals:
            self._decide(EXIT_CLEAN, f"{signal.Signals(self._signals[0]).name}: shutting down")
        elif self._serving and self._heartbeats.step_seconds > limit:
            self._decide(EXIT_HANG, f"no step was completed in {limit:g} s (--step-timeout)")
        elif self._serving and (stale := self._heartbeats.stale(limit)):
            self._decide(EXIT_HANG, f"the {stale} process has been silent for {limit:g} s")

    def _read_reports(self, child: ChildProcess) -> None:
        if not (data := os.read(child.status, 1 << 16)):
            self._selector.unregister(child.status)
        *lines, child.unread = (child.unread + data).split(b"\n")
        for event, message, info in map(msgspec.json.decode, lines):
            if event == "ready":
                child.ready = True
                self._info |= info
                if all(c.ready for c in self._children.values()):
                    self._children[API].write(b"ready " + msgspec.json.encode(self._info))
            elif event == "serving":
                self._serving = True
                log.info("ready: %s", self._url)
            elif event == "config":
                raise ConfigError(message)
            else:
                child.reason = message

    def _child_exited(self, child: ChildProcess) -> None:
        self._selector.unregister(child.exit_descriptor)
        if child.status in self._selector.get_map():
            self._read_reports(child)  # its last words
        self._decide(EXIT_INTERNAL, child.exit_text())

    # Open requests get their error, children a moment to end, if no further signal comes. The exit
    # code.
    def _end(self, code: int, reason: str) -> int:
        signals = len(self._signals)
        log.log(logging.INFO if code == EXIT_CLEAN else logging.ERROR, "%s", reason)
        if not self._serving:
            return code
        if code == EXIT_HANG:
            for child in self._children.values():
                os.killpg(child.pid, DUMP_SIGNAL)  # tensor-parallel workers too
                time.sleep(0.2)  # for its stacks, before those of the next
        self._children[API].write(b"stop" if code == EXIT_CLEAN else f"fail {reason}".encode())
        for role in (SCHEDULER, DETOKENIZER):
            os.kill(self._children[role].pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while (
            any(c.running for c in self._children.values())
            and (left := deadline - time.monotonic()) > 0
        ):
            self._dispatch(left)
            if len(self._signals) > signals:
                return 128 + self._signals[-1]
        return code


@contextlib.contextmanager
def private_directory() -> Iterator[str]:
    """A new directory, mode 0700, for the sockets; its janitor removes it also when this process
    was killed."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    usable = base is not None and os.access(base, os.W_OK | os.X_OK) and len(base) < 60
    path = tempfile.mkdtemp(prefix="radix-", dir=base if usable else "/tmp")
    janitor = [sys.executable, "-I", "-S", "-c", _JANITOR, path]
    try:
        with subprocess.Popen(janitor, stdin=subprocess.PIPE, start_new_session=True):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def bind_port(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    if port > 65535:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"--port must be at most 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        both = family == socket.AF_INET6
        listener = socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
        # Connections inherit it: the kernel ends those that stall.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_STALL * 1000))
        return listener
    except (OSError, ValueError) as error:  # ValueError: a system without IPv6
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use; choose another --port") from error
        reason = str(getattr(error, "strerror", None) or error).partition(" (")[
            0
        ]  # the rest repeats the address
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
