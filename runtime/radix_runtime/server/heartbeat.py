"""Heartbeats: one page of shared memory that tells who is alive and whether steps complete."""

import mmap
import os
import time

from .ipc import ROLES, SCHEDULER

STALE_SECONDS = 10.0  # a process that has not beaten for so long is not healthy


class Heartbeats:
    """The shared page: a memfd that the children inherit. `descriptor` None creates it."""

    # Each word of 8 bytes has one writer and is stored as a whole.
    # word 0..2  last beat of api, scheduler, detokenizer; CLOCK_MONOTONIC ns, 0 = not ready yet
    # word 3     ns for which the engine had not completed a step when the scheduler process last
    #            looked; 0: idle
    _STEP = len(ROLES)

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("radix-heartbeats")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")

    def beat(self, role: str) -> None:
        """The process of this role is alive."""
        self._words[ROLES.index(role)] = time.monotonic_ns()

    def stale(self, limit: float = STALE_SECONDS) -> str | None:
        """The process that has been silent for longest since its first beat, if for more than
        `limit` seconds."""
        now = time.monotonic_ns()
        last = {role: self._words[word] or now for word, role in enumerate(ROLES)}
        worst = min(ROLES, key=lambda role: last[role])
        return worst if now - last[worst] > limit * 1e9 else None

    def watch_step(self, since: float | None) -> None:
        """Notes when the engine last completed a step (time.monotonic(); None: it is idle), and
        beats for a scheduler whose loop waits for a long step."""
        if since is None:
            self._words[self._STEP] = 0
            return
        self._words[self._STEP] = int(1e9 * (time.monotonic() - since))
        self.beat(SCHEDULER)

    @property
    def step_seconds(self) -> float:
        """How long the engine had been without a completed step at the last look; 0: idle."""
        return self._words[self._STEP] / 1e9
