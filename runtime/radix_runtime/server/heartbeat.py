"""Heartbeats: one page of anonymous shared memory that tells who is alive and whether steps move.

    word 0..2    last beat of api, scheduler, detokenizer; CLOCK_MONOTONIC ns, 0 = not ready yet
    word 3       ns for which the engine had not completed a step when the scheduler process last looked, 0 = idle

Each word has one writer and is stored as one aligned 8-byte write. The memory is a memfd that the children inherit, so
nothing of it is left when the last of them is gone."""

from __future__ import annotations

import mmap
import os
import time

from .ipc import ROLES, SCHEDULER

STALE_SECONDS = 10.0  # a process that has not beaten for so long is not healthy
_STEP = len(ROLES)


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

    def stale(self, limit: float = STALE_SECONDS) -> str | None:
        """The process that has been silent for longest since its first beat, if for more than `limit` seconds."""
        now = time.monotonic_ns()
        last = {role: self._words[i] or now for i, role in enumerate(ROLES)}
        worst = min(ROLES, key=lambda role: last[role])
        return worst if now - last[worst] > limit * 1e9 else None

    def watch_step(self, since: float | None) -> None:
        """To be told about once a second: when the engine last completed a step, None if it is idle. The scheduler's
        loop may wait for a step longer than a heartbeat, so this beats in its stead."""
        self._words[_STEP] = 0 if since is None else int(1e9 * (time.monotonic() - since))
        if since is not None:
            self.beat(SCHEDULER)

    @property
    def step_seconds(self) -> float:
        """How long the engine has been at work without completing a step."""
        return self._words[_STEP] / 1e9
