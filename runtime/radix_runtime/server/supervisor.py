"""The supervisor of `radix serve`: starts the processes, watches them, ends them together.

    radix serve (this process)
      |- janitor       removes the private directory when this process is gone, however it went
      |- detokenizer
      |- scheduler     rank 0; starts the tensor-parallel workers in its own process group
      |- api           has inherited the listening socket

Any exit of a child while serving is fatal: the API fails its open requests, then all end. Nothing
polls: the loop sleeps on exit descriptors, status pipes and signals, and looks at the heartbeats
once a second. Start-up is over when the API reports `serving`; before that nothing is graceful.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..config import ServerArgs
from ..errors import EXIT_CLEAN, EXIT_HANG, EXIT_INTERNAL, ConfigError
from .child import DUMP_SIGNAL, Launch
from .heartbeat import Heartbeats, StepWatch
from .ipc import API, DETOKENIZER, SCHEDULER, TOKEN_BYTES
from .processes import ChildProcess, PrivateDirectory, url_of

MODULES: Mapping[str, str] = {
    DETOKENIZER: "radix_runtime.server.detokenizer_process",
    SCHEDULER: "radix_runtime.server.scheduler_process",
    API: "radix_runtime.server.api_process",
}
_TICK = 1.0  # seconds between two looks at the heartbeats
_GRACE = 2.5  # seconds that children have to end by themselves
_DUMP_TIME = 0.5  # seconds for a hung process to print its stacks

log = logging.getLogger(__name__)


class Supervisor:
    """One serving instance. The caller binds `listener`, so that a port in use is known before
    anything else happens. `modules` are the children's main modules."""

    def __init__(self, args: ServerArgs, listener: socket.socket, modules: Mapping[str, str] = MODULES) -> None:
        self._args = args
        self._listener = listener
        self._url = url_of(listener)
        self._modules = modules
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._heartbeats = Heartbeats()
        self._steps = StepWatch(self._heartbeats, args.step_timeout)
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, ChildProcess] = {}
        self._info: dict[str, Any] = {}
        self._serving = False
        self._signals: list[int] = []
        self._verdict: tuple[int, str] | None = None  # exit code and reason, once decided
        self._config_error: str | None = None

    def run(self) -> int:
        """Serves until a signal or a failure; the exit code. Raises ConfigError when a child finds
        that the configuration cannot work. Must run in the main thread: children die with it."""
        restore_signals = self._catch_signals()
        directory = PrivateDirectory()
        try:
            for role in (DETOKENIZER, SCHEDULER, API):
                self._start(role, directory.path)
            self._listener.close()  # an API that dies must not leave clients in its backlog
            self._watch()
            code = self._end()
        finally:
            for child in self._children.values():
                child.close()
            directory.close()
            self._selector.close()
            restore_signals()
        if self._config_error is not None:
            raise ConfigError(self._config_error)
        return code

    def _start(self, role: str, directory: str) -> None:
        launch = Launch(
            role=role,
            args=self._args,
            directory=directory,
            token=self._token,
            parent=os.getpid(),
            heartbeat_fd=self._heartbeats.descriptor,
            listen_fd=self._listener.fileno() if role == API else None,
        )
        inherited = [fd for fd in (launch.heartbeat_fd, launch.listen_fd) if fd is not None]
        child = ChildProcess([sys.executable, "-m", self._modules[role]], launch, inherited)
        self._children[role] = child
        self._on_readable(child.status, lambda: self._read_reports(child))
        self._on_readable(child.exit_descriptor, lambda: self._child_exited(child))

    def _on_readable(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def _dispatch(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()

    # Serving ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Returns when there is a verdict."""
        while self._verdict is None:
            self._dispatch(_TICK)
            if self._signals:
                name = signal.Signals(self._signals[0]).name
                self._decide(EXIT_CLEAN, f"{name}: shutting down")
            elif self._serving:
                self._check_progress()

    def _decide(self, code: int, reason: str) -> None:
        if self._verdict is None:
            self._verdict = (code, reason)

    def _check_progress(self) -> None:
        limit = self._args.step_timeout
        stale = self._heartbeats.stale(limit)
        if self._steps.hung():
            self._decide(EXIT_HANG, f"no step was completed in {limit:g} s (--step-timeout)")
        elif stale is not None:
            self._decide(EXIT_HANG, f"the {stale} process has been silent for {limit:g} s")

    def _read_reports(self, child: ChildProcess) -> None:
        reports = child.reports()
        if reports is None:
            self._selector.unregister(child.status)
            return
        for report in reports:
            if report.event == "ready":
                child.ready = True
                self._info.update(report.info)
                if all(c.ready for c in self._children.values()):
                    info = msgspec.json.encode(self._info).decode()
                    self._children[API].command(f"ready {info}")
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
        child.running = False

    # Ending -------------------------------------------------------------------------------

    def _end(self) -> int:
        """Open requests get their error, children a moment to end. The exit code."""
        assert self._verdict is not None
        code, reason = self._verdict
        if self._config_error is None:
            log.log(logging.INFO if code == EXIT_CLEAN else logging.ERROR, "%s", reason)
        if not self._serving:
            return code
        self._children[API].command("stop" if code == EXIT_CLEAN else f"fail {reason}")
        if code == EXIT_HANG:
            for child in self._children.values():
                child.send_signal(DUMP_SIGNAL)
            time.sleep(_DUMP_TIME)
        for role in (SCHEDULER, DETOKENIZER):
            self._children[role].send_signal(signal.SIGTERM)
        signals = len(self._signals)
        deadline = time.monotonic() + _GRACE
        while any(child.running for child in self._children.values()):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._dispatch(left)
            if len(self._signals) > signals:
                return 128 + self._signals[-1]
        return code

    def _catch_signals(self) -> Callable[[], None]:
        """SIGTERM and SIGINT are noted and wake the loop. Returns what undoes this."""
        wake, sleeper = socket.socketpair()
        wake.setblocking(False)
        old_fd = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT)
        old = {n: signal.signal(n, lambda num, _: self._signals.append(num)) for n in numbers}
        self._on_readable(sleeper.fileno(), lambda: _discard(sleeper))

        def restore() -> None:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)
            wake.close()
            sleeper.close()

        return restore


def _discard(sleeper: socket.socket) -> None:
    sleeper.recv(64)
