"""The processes of ranks 1 .. N-1: started, watched and ended by rank 0."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from ..config import ServerArgs
from ..distributed import Communicator
from .step_ring import RingHandle, StepRing

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
_NEWS_SECONDS = 0.5  # between a broken exchange and the news of the death that broke it


class WorkerSpec(msgspec.Struct, forbid_unknown_fields=True):
    """What a worker reads from its standard input. `parent_pid` is rank 0's process; the worker
    may ask the kernel to end it with the thread that started it if `main_thread` started it."""

    args: ServerArgs
    rank: int
    memory_fd: int
    ring: RingHandle
    parent_pid: int
    main_thread: bool


class WorkerGroup:
    """Starts the workers. `on_death(reason)` is called on the watching thread, once, when one ends
    that should not. Each holds the read end of a pipe whose other end dies with this process."""

    def __init__(self, args: ServerArgs, on_death: Callable[[str], None]) -> None:
        self.ring = StepRing(args.tp_size - 1)
        self.failure: str | None = None
        self._on_death = on_death
        self._memory_fd = os.memfd_create("radix-comm")
        self.memory_path = f"/proc/self/fd/{self._memory_fd}"  # the communicator's file
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._news = threading.Event()
        self._watcher: threading.Thread | None = None
        self._processes = [self._start(args, rank) for rank in range(1, args.tp_size)]
        self.pids = [process.pid for process in self._processes]

    def _start(self, args: ServerArgs, rank: int) -> subprocess.Popen[bytes]:
        spec = WorkerSpec(
            args=args,
            rank=rank,
            memory_fd=self._memory_fd,
            ring=self.ring.handle,
            parent_pid=os.getpid(),
            main_thread=threading.current_thread() is threading.main_thread(),
        )
        # The worker finds what this process finds, and nothing of the current directory besides.
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "radix_runtime.engine.worker"],
            stdin=subprocess.PIPE,
            stdout=2,  # what it prints is no output of this program
            pass_fds=[self._memory_fd, *self.ring.handle.fds],
            env={**os.environ, **paths},
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()  # and stays open: its end tells the worker that we are gone
        return process

    def watch(self, communicator: Communicator) -> None:
        """From now on a death aborts `communicator` and closes the ring."""
        self._watcher = threading.Thread(target=self._watch, args=[communicator], name="radix-workers", daemon=True)
        self._watcher.start()

    def _watch(self, communicator: Communicator) -> None:
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        ranks = {os.pidfd_open(process.pid): r for r, process in enumerate(self._processes, 1)}
        for fd in ranks:
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll()]
        for fd in ranks:
            os.close(fd)
        if self._stop_fd in ready:
            return
        rank = ranks[ready[0]]
        process = self._processes[rank - 1]
        code = process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        self.failure = f"tensor-parallel rank {rank} (pid {process.pid}) {how}"
        logger.error("%s", self.failure)
        self._on_death(self.failure)
        self._news.set()
        communicator.abort()
        self.ring.close()

    def await_death(self) -> None:
        """Gives a death that is under way the time to be noticed."""
        self._news.wait(_NEWS_SECONDS)

    def close(self) -> None:
        """Ends the workers after the last published step; kills what does not end. Idempotent."""
        if self._memory_fd < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        if self._watcher is not None:
            self._watcher.join()
        self.ring.close()
        for process in self._processes:
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self.ring.release()
        os.close(self._memory_fd)
        os.close(self._stop_fd)
        self._memory_fd = -1
