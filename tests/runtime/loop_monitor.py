"""How long the callbacks of an event loop hold it: the loop's CPU time, callback by callback."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from dataclasses import dataclass
from typing import Any

LIMIT = 0.010  # seconds of CPU that one callback may take


class LoopHeld(AssertionError):
    """A callback has held the event loop for too long."""


@dataclass(frozen=True)
class Callback:
    """One callback that has run: CPU and wall time in seconds, and what it was."""

    cpu: float
    wall: float
    what: str


class LoopMonitor:
    """Measures every callback of one event loop while its `with` block is open.

    CPU time is that of the thread that runs the loop (`time.thread_time`), so that neither other
    threads nor other programs count; pauses of the collector that fall into a callback do. Wall
    time is reported only. `worst` is the callback that took the most CPU time, `collector` the
    longest pause of the collector on the loop's thread, in seconds of CPU."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._original = asyncio.Handle._run
        self._thread = 0  # of the loop, known from its first callback on
        self._pause_began = 0.0
        self.reset()

    def reset(self) -> None:
        """Forgets what has been measured so far."""
        self.worst = Callback(cpu=0.0, wall=0.0, what="")
        self.longest_wall = 0.0
        self.collector = 0.0
        self.count = 0

    def __enter__(self) -> LoopMonitor:
        original = self._original
        monitor = self

        def run(handle: Any) -> None:
            if handle._loop is not monitor._loop:
                original(handle)
                return
            what = handle._callback
            cpu = time.thread_time()
            wall = time.perf_counter()
            original(handle)
            monitor._note(what, time.thread_time() - cpu, time.perf_counter() - wall)

        asyncio.Handle._run = run  # type: ignore[assignment]
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.Handle._run = self._original
        gc.callbacks.remove(self._on_collection)

    def _note(self, what: Any, cpu: float, wall: float) -> None:
        self._thread = threading.get_ident()
        self.count += 1
        self.longest_wall = max(self.longest_wall, wall)
        if cpu > self.worst.cpu:
            self.worst = Callback(cpu=cpu, wall=wall, what=_describe(what))

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._pause_began = time.thread_time()
        else:
            self.collector = max(self.collector, time.thread_time() - self._pause_began)

    def report(self) -> str:
        """What was measured, in one line."""
        return (
            f"{self.count} callbacks; worst {1e3 * self.worst.cpu:.1f} ms of CPU "
            f"({1e3 * self.worst.wall:.1f} ms of wall time) in {self.worst.what}; "
            f"longest wall time {1e3 * self.longest_wall:.1f} ms; "
            f"collector {1e3 * self.collector:.1f} ms"
        )

    def check(self, limit: float = LIMIT) -> None:
        """Raises LoopHeld if a callback has taken `limit` seconds of CPU."""
        assert self.count > 0, "the monitor has seen no callback"
        if self.worst.cpu >= limit:
            raise LoopHeld(self.report())


def _describe(callback: Any) -> str:
    """The coroutine of a task's step, else the callback."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return repr(task.get_coro())[:200]
    return repr(callback)[:200]
