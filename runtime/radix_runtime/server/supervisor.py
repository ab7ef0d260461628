"""The supervisor of `radix serve`: starts the processes, watches them, ends them together.

    radix serve (this process)
      |- janitor       removes the private directory when this process is gone, however it went
      |- detokenizer
      |- scheduler     rank 0; starts the tensor-parallel workers in its own process group
      |- api           has inherited the listening socket

Any exit of a child while serving is fatal: the API fails its open requests, then all end. Nothing polls: the loop
sleeps on exit descriptors, status pipes and signals, and looks at the heartbeats once a second. Start-up is over when
the API reports `serving`; before that nothing is graceful."""

from __future__ import annotations

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
from .child import DUMP_SIGNAL, Info, Launch, Report, on_signals
from .heartbeat import Heartbeats
from .ipc import API, DETOKENIZER, SCHEDULER, TOKEN_BYTES

_JANITOR = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
_BACKLOG = 2048
_MAX_PORT = 65535
_TICK = 1.0  # seconds between two looks at the heartbeats
_GRACE = 2.5  # seconds that children have to end by themselves
_DUMP_TIME = 0.5  # seconds for a hung process to print its stacks
_KILL_WAIT = 5.0  # seconds for the kernel to end a killed process

log = logging.getLogger(__name__)


class ChildProcess:
    """A child with its status pipe and exit descriptor, and what it has reported.

    It leads a process group of its own. It is reaped in `close` only: until then neither its pid nor its group can mean
    anybody else."""

    def __init__(self, launch: Launch) -> None:
        self.role = launch.role
        self.status, launch.status_fd = os.pipe()
        inherited = (launch.status_fd, launch.heartbeat_fd, launch.listen_fd)
        self._popen = subprocess.Popen(
            [sys.executable, "-m", f"radix_runtime.server.{launch.role}_process"],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=[descriptor for descriptor in inherited if descriptor is not None],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        os.close(launch.status_fd)
        self.exit_descriptor = os.pidfd_open(self._popen.pid)
        self.running, self.ready, self.reason = True, False, ""
        self._unread = b""
        self.write(msgspec.json.encode(launch))

    def write(self, line: bytes) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # it does not read; its exit tells the rest
            self._popen.stdin.write(line + b"\n")

    def reports(self) -> list[Report] | None:
        """What the child has written since; call it when `status` is readable. None: it closed."""
        data = os.read(self.status, 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [msgspec.json.decode(line, type=Report) for line in lines] if data else None

    def exit_text(self) -> str:
        """How it ended, for a person. Only after `exit_descriptor` became readable."""
        self.running = False
        result = os.waitid(os.P_PIDFD, self.exit_descriptor, os.WEXITED | os.WNOWAIT)
        if result is None or result.si_code == os.CLD_EXITED:
            how = f"exited with code {result.si_status if result else '?'}"
        else:
            how = f"was killed by {signal.Signals(result.si_status).name}"
        return f"the {self.role} process {how}" + (f": {self.reason}" if self.reason else "")

    def send_signal(self, number: int) -> None:
        if self.running:
            os.kill(self._popen.pid, number)

    def close(self) -> None:
        """Kills what is left of it and of what it has started, and reaps it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        try:
            self._popen.wait(_KILL_WAIT)
        except subprocess.TimeoutExpired:
            log.error("process %d (%s) survives SIGKILL", self._popen.pid, self.role)


class Supervisor:
    """One serving instance. The caller binds `listener`, so that a port in use is known first of all."""

    def __init__(self, args: ServerArgs, listener: socket.socket) -> None:
        self._args = args
        self._listener = listener
        self._url = url_of(listener)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._heartbeats = Heartbeats()
        self._selector = selectors.DefaultSelector()  # the data of an entry is what to call
        self._children: dict[str, ChildProcess] = {}
        self._info: Info = {}
        self._serving = False
        self._signals: list[int] = []
        self._verdict: tuple[int, str] | None = None  # exit code and reason, once decided
        self._config_error: str | None = None

    def run(self) -> int:
        """Serves until a signal or a failure; the exit code. Raises ConfigError when a child finds that the
        configuration cannot work. Must run in the main thread: children die with it."""
        wake = on_signals(self._signals.append, signal.SIGTERM, signal.SIGINT)
        self._selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(64))
        with private_directory() as directory:
            try:
                for role in (DETOKENIZER, SCHEDULER, API):
                    self._start(role, directory)
                self._listener.close()  # an API that dies must not leave clients in its backlog
                while self._verdict is None:
                    self._dispatch(_TICK)
                    self._look()
                code = self._end(*self._verdict)
            finally:
                for child in self._children.values():
                    child.close()
        if self._config_error is not None:
            raise ConfigError(self._config_error)
        return code

    def _start(self, role: str, directory: str) -> None:
        listen_fd = self._listener.fileno() if role == API else None
        fixed = directory, self._token, os.getpid(), self._heartbeats.descriptor
        child = self._children[role] = ChildProcess(Launch(role, self._args, *fixed, listen_fd=listen_fd))
        self._selector.register(child.status, selectors.EVENT_READ, lambda: self._read_reports(child))
        self._selector.register(child.exit_descriptor, selectors.EVENT_READ, lambda: self._child_exited(child))

    def _dispatch(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()

    def _decide(self, code: int, reason: str) -> None:
        self._verdict = self._verdict or (code, reason)

    def _look(self) -> None:
        """At the signals and at the heartbeats."""
        limit = self._args.step_timeout
        if self._signals:
            self._decide(EXIT_CLEAN, f"{signal.Signals(self._signals[0]).name}: shutting down")
        elif self._serving and self._heartbeats.step_seconds > limit:
            self._decide(EXIT_HANG, f"no step was completed in {limit:g} s (--step-timeout)")
        elif self._serving and (stale := self._heartbeats.stale(limit)):
            self._decide(EXIT_HANG, f"the {stale} process has been silent for {limit:g} s")

    def _read_reports(self, child: ChildProcess) -> None:
        reports = child.reports()
        if reports is None:
            self._selector.unregister(child.status)
        for report in reports or ():
            if report.event == "ready":
                child.ready = True
                self._info |= report.info
                if all(c.ready for c in self._children.values()):
                    self._children[API].write(b"ready " + msgspec.json.encode(self._info))
            elif report.event == "serving":
                self._serving = True
                log.info("ready: %s", self._url)
            elif report.event == "config":
                self._config_error = report.message
            else:
                child.reason = report.message

    def _child_exited(self, child: ChildProcess) -> None:
        self._selector.unregister(child.exit_descriptor)
        if child.status in self._selector.get_map():
            self._read_reports(child)  # its last words
        self._decide(EXIT_INTERNAL, child.exit_text())

    def _end(self, code: int, reason: str) -> int:
        """Open requests get their error, children a moment to end. The exit code."""
        if self._config_error is None:
            log.log(logging.INFO if code == EXIT_CLEAN else logging.ERROR, "%s", reason)
        if not self._serving:
            return code
        self._children[API].write(b"stop" if code == EXIT_CLEAN else f"fail {reason}".encode())
        if code == EXIT_HANG:
            for child in self._children.values():
                child.send_signal(DUMP_SIGNAL)
            time.sleep(_DUMP_TIME)
        for role in (SCHEDULER, DETOKENIZER):
            self._children[role].send_signal(signal.SIGTERM)
        signals, deadline = len(self._signals), time.monotonic() + _GRACE
        while any(c.running for c in self._children.values()) and (left := deadline - time.monotonic()) > 0:
            self._dispatch(left)
            if len(self._signals) > signals:
                return 128 + self._signals[-1]
        return code


@contextlib.contextmanager
def private_directory() -> Iterator[str]:
    """A new directory, mode 0700, for the sockets. A janitor process removes it when this process has gone, also by
    SIGKILL."""
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
    if port > _MAX_PORT:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"--port must be at most {_MAX_PORT}, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use; choose another --port") from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
