"""The supervisor's handles: a child process, the private directory with its janitor, the port."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import msgspec

from ..errors import ConfigError
from .child import Launch, Report

_JANITOR = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
_BACKLOG = 2048
_MAX_PORT = 65535
_KILL_WAIT = 5.0  # seconds for the kernel to end a killed process

log = logging.getLogger(__name__)


class ChildProcess:
    """A child with its status pipe and exit descriptor, and what it has reported.

    It leads a process group of its own. It is reaped in `close` only: until then neither its pid
    nor its group can mean anybody else.
    """

    def __init__(self, command: list[str], launch: Launch, descriptors: list[int]) -> None:
        self.role = launch.role
        self.status, launch.status_fd = os.pipe()
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[launch.status_fd, *descriptors],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        os.close(launch.status_fd)
        self.pid = self._popen.pid
        self.exit_descriptor = os.pidfd_open(self.pid)
        self.running = True
        self.ready = False
        self.reason = ""
        self._unread = b""
        self._write(launch.frame())

    def command(self, line: str) -> None:
        self._write(line.encode() + b"\n")

    def _write(self, data: bytes) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(data)
            self._popen.stdin.flush()
        except OSError:
            log.debug("%s does not read its commands", self.role)  # its exit tells the rest

    def reports(self) -> list[Report] | None:
        """What the child has written since; call it when `status` is readable. None: it closed."""
        data = os.read(self.status, 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        reports = [msgspec.json.decode(line, type=Report) for line in lines]
        return reports if data else None

    def exit_text(self) -> str:
        """How it ended, for a person. Only after `exit_descriptor` became readable."""
        self.running = False
        result = os.waitid(os.P_PIDFD, self.exit_descriptor, os.WEXITED | os.WNOWAIT)
        if result is None or result.si_code == os.CLD_EXITED:
            how = f"exited with code {result.si_status if result else '?'}"
        else:
            how = f"was killed by {signal.Signals(result.si_status).name}"
        return f"the {self.role} process {how}" + (f": {self.reason}" if self.reason else "")

    def send_signal(self, signum: int) -> None:
        if self.running:
            os.kill(self.pid, signum)

    def close(self) -> None:
        """Kills what is left of it and of what it has started, and reaps it."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            self._popen.wait(_KILL_WAIT)
        except subprocess.TimeoutExpired:
            log.error("process %d (%s) survives SIGKILL", self.pid, self.role)
        self.running = False
        os.close(self.status)
        os.close(self.exit_descriptor)
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.close()
        except OSError:
            pass


class PrivateDirectory:
    """A new directory, mode 0700, for the sockets. A janitor process removes it when this process
    has gone, also by SIGKILL."""

    def __init__(self) -> None:
        base = os.environ.get("XDG_RUNTIME_DIR")
        usable = base is not None and os.access(base, os.W_OK | os.X_OK) and len(base) < 60
        self.path = tempfile.mkdtemp(prefix="radix-", dir=base if usable else "/tmp")
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _JANITOR, self.path], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait()
        shutil.rmtree(self.path, ignore_errors=True)


def bind_port(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    if port > _MAX_PORT:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"--port must be at most {_MAX_PORT}, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use; choose another --port") from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
