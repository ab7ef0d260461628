"""A child of the supervisor, as the supervisor sees it."""

import contextlib
import logging
import os
import signal
import subprocess

import msgspec

from ..spawn import signal_name, start_process
from .child import Launch

_KILL_TIME = 5.0  # seconds for the kernel to end a killed process

log = logging.getLogger(__name__)


class ChildProcess:
    """A child and its process group. Only `close` reaps it: until then its pid can belong to
    nothing else.

    `process` is its id, `label` its name for people. `status` is the pipe of its reports, `unread`
    the beginning of one that has not come to its end; `exit_descriptor` is readable once it has
    exited; `reason` is what it gave for its end."""

    def __init__(self, launch: Launch, label: str) -> None:
        self.process = launch.process
        self.label = label
        self.status, launch.status_fd = os.pipe()
        self._popen = start_process(
            "radix_runtime.processes.child",
            title=f"radix: {label}",
            bufsize=0,
            pass_fds=launch.descriptors,
            start_new_session=True,
        )
        os.close(launch.status_fd)
        self.pid = self._popen.pid
        self.exit_descriptor = os.pidfd_open(self.pid)
        self.running = True
        self.ready = False
        self.serving = False
        self.reason = ""
        self.unread = b""
        self._is_asked = False
        self._is_closed = False
        self.write(msgspec.json.encode(launch))

    def write(self, line: bytes) -> None:
        """Sends a line to its standard input."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # it does not read; its exit tells the rest
            self._popen.stdin.write(line + b"\n")

    def ask_to_end(self) -> None:
        """Sends SIGTERM. May be called again."""
        if not self._is_asked:
            self._is_asked = True
            os.kill(self.pid, signal.SIGTERM)

    def exit_text(self) -> str:
        """How it ended, for a person. Only after `exit_descriptor` became readable."""
        result = os.waitid(os.P_PIDFD, self.exit_descriptor, os.WEXITED | os.WNOWAIT)
        assert result is not None
        how = f"exited with code {result.si_status}"
        if result.si_code != os.CLD_EXITED:
            how = f"was killed by {signal_name(result.si_status)}"
        text = f"the {self.label} process {how}"
        return f"{text}: {self.reason}" if self.reason else text

    def close(self) -> None:
        """Kills what is left of it and of the processes it has started, and reaps it. May be called
        again."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._popen.wait(_KILL_TIME)
        except subprocess.TimeoutExpired:
            log.error("process %d (%s) survives SIGKILL", self.pid, self.label)
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        os.close(self.status)
        os.close(self.exit_descriptor)
