"""The supervisor of `radix serve`: starts the processes, watches them, ends them together.

docs/serving.md has the cases in which it ends them."""

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
from collections.abc import Callable, Iterator

import msgspec

from ..config import ServerArgs
from ..errors import EXIT_CLEAN, EXIT_HANG, EXIT_INTERNAL, ConfigError
from ..processes import DUMP_SIGNAL, start_process
from .child import Info, Launch, on_signals
from .heartbeat import Heartbeats
from .ipc import API, DETOKENIZER, SCHEDULER, TOKEN_BYTES

_JANITOR = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
_TICK = 1.0  # seconds between two looks at the heartbeats
_GRACE = 2.5  # seconds that children have to end by themselves
_DUMP_TIME = 0.2  # seconds for a process to print its stacks
_KILL_TIME = 5.0  # seconds for the kernel to end a killed process
WRITE_STALL = 30.0  # seconds that a client may read nothing, or be silent, while bytes wait for it

log = logging.getLogger(__name__)


class ChildProcess:
    """A child and its process group. Only `close` reaps it: until then its pid can belong to
    nothing else.

    `status` is the pipe of its reports, `unread` the beginning of one that has not come to its end;
    `exit_descriptor` is readable once it has exited; `reason` is what it gave for its end."""

    def __init__(self, launch: Launch) -> None:
        self.role = launch.role
        self.status, launch.status_fd = os.pipe()
        self._popen = start_process(
            "radix_runtime.server.child",
            f"{launch.role}_process",
            bufsize=0,
            pass_fds=launch.descriptors,
            start_new_session=True,
        )
        os.close(launch.status_fd)
        self.pid = self._popen.pid
        self.exit_descriptor = os.pidfd_open(self.pid)
        self.running = True
        self.ready = False
        self.reason = ""
        self.unread = b""
        self.write(msgspec.json.encode(launch))

    def write(self, line: bytes) -> None:
        """Sends a line to its standard input."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # it does not read; its exit tells the rest
            self._popen.stdin.write(line + b"\n")

    def exit_text(self) -> str:
        """How it ended, for a person. Only after `exit_descriptor` became readable."""
        result = os.waitid(os.P_PIDFD, self.exit_descriptor, os.WEXITED | os.WNOWAIT)
        assert result is not None
        how = f"exited with code {result.si_status}"
        if result.si_code != os.CLD_EXITED:
            how = f"was killed by {signal.Signals(result.si_status).name}"
        text = f"the {self.role} process {how}"
        return f"{text}: {self.reason}" if self.reason else text

    def close(self) -> None:
        """Kills what is left of it and of the processes it has started, and reaps it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._popen.wait(_KILL_TIME)
        except subprocess.TimeoutExpired:
            log.error("process %d (%s) survives SIGKILL", self.pid, self.role)


class Supervisor:
    """One serving instance. The caller binds `listener`, so that a port in use is known before
    anything else happens. `on_serving` is called once, with the URL and what the processes have
    reported, when requests are taken."""

    def __init__(
        self,
        args: ServerArgs,
        listener: socket.socket,
        on_serving: Callable[[str, Info], None],
    ) -> None:
        self._args = args
        self._on_serving = on_serving
        self._listener = listener
        self._url = _url_of(listener)
        self._heartbeats = Heartbeats()
        self._selector = selectors.DefaultSelector()  # the data of an entry is what to call
        self._children: dict[str, ChildProcess] = {}
        self._info: Info = {}
        self._serving = False
        self._signals: list[int] = []
        self._verdict: tuple[int, str] | None = None  # exit code and reason, once decided

    def run(self) -> int:
        """Serves until a signal or a failure; the exit code. Runs in the main thread only. Raises
        ConfigError when a child finds that the configuration cannot work."""
        wake = on_signals(self._signals.append, signal.SIGTERM, signal.SIGINT)
        self._on_readable(wake.fileno(), lambda: wake.recv(64))
        token = secrets.token_bytes(TOKEN_BYTES)
        with private_directory() as directory:
            try:
                for role in (DETOKENIZER, SCHEDULER, API):
                    self._start(role, directory, token)
                self._listener.close()  # an API that dies must not leave clients in its backlog
                while self._verdict is None:
                    self._dispatch(_TICK)
                    self._look()
                return self._end(*self._verdict)
            finally:
                for child in self._children.values():
                    child.close()

    def _start(self, role: str, directory: str, token: bytes) -> None:
        launch = Launch(
            role=role,
            args=self._args,
            directory=directory,
            token=token,
            parent=os.getpid(),
            heartbeat_fd=self._heartbeats.descriptor,
            listen_fd=self._listener.fileno() if role == API else None,
        )
        child = ChildProcess(launch)
        self._children[role] = child
        self._on_readable(child.status, lambda: self._read_reports(child))
        self._on_readable(child.exit_descriptor, lambda: self._child_exited(child))

    def _on_readable(self, descriptor: int, handler: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def _dispatch(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()

    def _decide(self, code: int, reason: str) -> None:
        if self._verdict is None:
            self._verdict = (code, reason)

    def _look(self) -> None:
        """Decides to end on a signal, or if steps or processes stand still."""
        if self._signals:
            self._decide(EXIT_CLEAN, f"{signal.Signals(self._signals[0]).name}: shutting down")
            return
        if not self._serving:
            return
        limit = self._args.step_timeout
        stale = self._heartbeats.stale(limit)
        if self._heartbeats.step_seconds > limit:
            self._decide(EXIT_HANG, f"no step was completed in {limit:g} s (--step-timeout)")
        elif stale is not None:
            self._decide(EXIT_HANG, f"the {stale} process has been silent for {limit:g} s")

    def _read_reports(self, child: ChildProcess) -> None:
        data = os.read(child.status, 1 << 16)
        if not data:
            self._selector.unregister(child.status)
        *lines, child.unread = (child.unread + data).split(b"\n")
        for line in lines:
            event, message, info = msgspec.json.decode(line)
            if event == "ready":
                child.ready = True
                self._info |= info
                if all(c.ready for c in self._children.values()):
                    self._children[API].write(b"ready " + msgspec.json.encode(self._info))
            elif event == "serving":
                self._serving = True
                self._on_serving(self._url, self._info)
                log.info("ready: %s", self._url)
            elif event == "config":
                raise ConfigError(message)
            else:
                child.reason = message

    def _child_exited(self, child: ChildProcess) -> None:
        self._selector.unregister(child.exit_descriptor)
        if child.status in self._selector.get_map():
            self._read_reports(child)  # its last words
        child.running = False
        self._decide(EXIT_INTERNAL, child.exit_text())

    def _end(self, code: int, reason: str) -> int:
        """Open requests get their error, children a moment to end unless a further signal comes.
        The exit code."""
        signals = len(self._signals)
        log.log(logging.INFO if code == EXIT_CLEAN else logging.ERROR, "%s", reason)
        if not self._serving:
            return code
        if code == EXIT_HANG:
            self._dump_stacks()
        self._children[API].write(b"stop" if code == EXIT_CLEAN else f"fail {reason}".encode())
        for role in (SCHEDULER, DETOKENIZER):
            os.kill(self._children[role].pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while any(child.running for child in self._children.values()):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._dispatch(left)
            if len(self._signals) > signals:
                return 128 + self._signals[-1]
        return code

    def _dump_stacks(self) -> None:
        for child in self._children.values():
            os.killpg(child.pid, DUMP_SIGNAL)  # tensor-parallel workers too
            time.sleep(_DUMP_TIME)  # for its stacks, before those of the next


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if ":" in host:  # IPv6
        host = f"[{host}]"
    return f"http://{host}:{port}"


@contextlib.contextmanager
def private_directory() -> Iterator[str]:
    """A new directory, mode 0700, for the sockets. A janitor process removes it, also when this
    one was killed."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    usable = (
        base is not None
        and os.access(base, os.W_OK | os.X_OK)
        and len(base) < 60  # the path of a socket has at most 107 bytes
    )
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
        listener = socket.create_server(
            address,
            family=family,
            backlog=2048,
            dualstack_ipv6=family == socket.AF_INET6,
        )
        # Connections inherit it: the kernel ends those that stall.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_STALL * 1000))
        return listener
    except (OSError, ValueError) as error:  # ValueError: a system without IPv6
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use; choose another --port") from error
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason.partition(" (")[0]  # the rest repeats the address
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
