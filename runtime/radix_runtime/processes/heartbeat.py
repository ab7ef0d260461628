"""Heartbeats: shared memory that tells which process is alive and whether steps complete."""

import mmap
import os
import time
from collections.abc import Sequence

STALE_SECONDS = 10.0  # a process that has not beaten for so long is not healthy
_WORD_BYTES = 8


class Heartbeats:
    """A table of words for each of `processes`, in a memfd that the children inherit. `descriptor`
    None creates it."""

    # Each word has one writer and is stored as a whole. A process has three:
    #   beat: its last beat; CLOCK_MONOTONIC ns, 0 = not ready yet
    #   step: ns for which its engine had not completed a step when the process last looked; 0: the
    #         engine is idle, or there is none
    #   stopped: since when it, or a process that it has started, has been stopped; ns, 0 = it runs.
    #         The supervisor's word

    def __init__(self, processes: Sequence[str], descriptor: int | None = None) -> None:
        self._beat_words = {process: 3 * row for row, process in enumerate(processes)}
        self._step_words = {process: 3 * row + 1 for row, process in enumerate(processes)}
        self._stopped_words = {process: 3 * row + 2 for row, process in enumerate(processes)}
        size = 3 * len(processes) * _WORD_BYTES
        if descriptor is None:
            descriptor = os.memfd_create("radix-heartbeats")
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, size)).cast("q")

    def beat(self, process: str) -> None:
        """This process is alive."""
        self._words[self._beat_words[process]] = time.monotonic_ns()

    def clear(self, process: str) -> None:
        """This process has ended: it is not silent, and its engine does no step."""
        self._words[self._beat_words[process]] = 0
        self._words[self._step_words[process]] = 0
        self._words[self._stopped_words[process]] = 0

    def note_stopped(self, process: str, stopped: bool) -> None:
        """This process, or one that it has started, is stopped now or runs."""
        word = self._stopped_words[process]
        if not stopped:
            self._words[word] = 0
        elif self._words[word] == 0:
            self._words[word] = time.monotonic_ns()

    def stale(self, limit: float = STALE_SECONDS) -> str | None:
        """The process that has been silent, or stopped, for longest since its first beat, if for
        more than `limit` seconds."""
        now = time.monotonic_ns()
        last = {}
        for process, word in self._beat_words.items():
            stopped = self._words[self._stopped_words[process]] or now
            last[process] = min(self._words[word] or now, stopped)
        worst = min(last, key=lambda process: last[process])
        return worst if now - last[worst] > limit * 1e9 else None

    def watch_step(self, process: str, since: float | None) -> None:
        """Notes when the engine of this process last completed a step (time.monotonic(); None: it
        is idle), and beats for a process whose loop waits for a long step."""
        if since is None:
            self._words[self._step_words[process]] = 0
            return
        self._words[self._step_words[process]] = int(1e9 * (time.monotonic() - since))
        self.beat(process)

    @property
    def step_seconds(self) -> float:
        """How long the engine had been without a completed step at the last look; 0: idle. The
        longest time of all engines."""
        return max(self._words[word] for word in self._step_words.values()) / 1e9
