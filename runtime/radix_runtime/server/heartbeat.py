"""Heartbeats: one page of anonymous shared memory that tells who is alive and whether steps move.

    word 0..2    last beat of api, scheduler, detokenizer; CLOCK_MONOTONIC ns, 0 = not ready yet
    word 3       steps launched      } by the scheduler process
    word 4       steps completed     }

Each word has one writer and is stored as one aligned 8-byte write. The memory is a memfd that the
children inherit, so nothing of it is left when the last of them is gone.
"""

from __future__ import annotations

import mmap
import os
import threading
import time

from ..step_plan import Executor, StepHandle, StepPlan, StepResult
from .ipc import ROLES, SCHEDULER

STALE_SECONDS = 10.0  # a process that has not beaten for so long is not healthy
_LAUNCHED, _COMPLETED = len(ROLES), len(ROLES) + 1


class Heartbeats:
    """Maps the shared page; `descriptor` None creates it."""

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("radix-heartbeats")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")

    def beat(self, role: str) -> None:
        self._words[ROLES.index(role)] = time.monotonic_ns()

    def age(self, role: str) -> float | None:
        """Seconds since the last beat; None before the first (the process still starts)."""
        last = self._words[ROLES.index(role)]
        return (time.monotonic_ns() - last) / 1e9 if last else None

    def stale(self, limit: float = STALE_SECONDS) -> str | None:
        """The process that has been silent for longest, if for more than `limit` seconds."""
        ages = {role: self.age(role) or 0.0 for role in ROLES}
        worst = max(ages, key=lambda role: ages[role])
        return worst if ages[worst] > limit else None

    def step_launched(self) -> None:
        self._words[_LAUNCHED] += 1

    def step_completed(self) -> None:
        self._words[_COMPLETED] += 1

    @property
    def steps(self) -> tuple[int, int]:
        """(completed, in flight)."""
        completed = self._words[_COMPLETED]
        return completed, self._words[_LAUNCHED] - completed


class StepWatch:
    """Finds a hang: steps in flight, and none completed for `timeout` seconds."""

    def __init__(self, heartbeats: Heartbeats, timeout: float) -> None:
        self._heartbeats = heartbeats
        self._timeout = timeout
        self._completed = -1  # when last seen busy; -1: was idle
        self._since = 0.0

    def hung(self) -> bool:
        """To be asked about once a second."""
        completed, in_flight = self._heartbeats.steps
        now = time.monotonic()
        if in_flight <= 0:
            self._completed = -1
            return False
        if completed != self._completed:
            self._completed, self._since = completed, now
        return now - self._since > self._timeout


class CountingExecutor:
    """An Executor that counts its steps in the heartbeat page.

    While a step is in flight the scheduler's loop may wait for it longer than a heartbeat; a thread
    beats in its stead. It stands still when the process does (SIGSTOP, a held GIL)."""

    def __init__(self, executor: Executor, heartbeats: Heartbeats) -> None:
        self._executor = executor
        self._heartbeats = heartbeats
        self.num_pages = executor.num_pages
        self.page_size = executor.page_size
        self.max_rows = executor.max_rows
        self.max_context = executor.max_context
        self.vocab_size = executor.vocab_size
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def launch(self, plan: StepPlan) -> StepHandle:
        self._heartbeats.step_launched()
        return _CountingHandle(self._executor.launch(plan), self._heartbeats)

    def close(self) -> None:
        self._executor.close()

    def _beat(self) -> None:
        while True:
            time.sleep(1.0)
            if self._heartbeats.steps[1] > 0:
                self._heartbeats.beat(SCHEDULER)


class _CountingHandle:
    def __init__(self, handle: StepHandle, heartbeats: Heartbeats) -> None:
        self._handle = handle
        self._heartbeats = heartbeats
        self._counted = False

    def done(self) -> bool:
        return self._handle.done()

    def result(self) -> StepResult:
        result = self._handle.result()
        if not self._counted:
            self._counted = True
            self._heartbeats.step_completed()
        return result
