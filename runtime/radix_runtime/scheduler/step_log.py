"""What the steps took: a ring of the last ones, always on, and with `--trace` a file of all."""

import logging
import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from ..errors import ConfigError
from ..step_plan import StepResult
from ..step_times import RING_STEPS, Event, StepTimes, row_names, step_events
from .batch_builder import Step

_FLUSH_STEPS = 256  # that a trace file may lag behind

log = logging.getLogger(__name__)


def step_times(
    step: Step, result: StepResult, *, awaited: float, completed: float, accepted: float
) -> StepTimes:
    """Of a step that has completed."""
    device_start = math.nan
    device_end = math.nan
    if result.device_span is not None:
        device_start, device_end = result.device_span.seconds()
    return StepTimes(
        step_id=step.plan.step_id,
        num_decode=step.plan.num_decode,
        num_chunks=len(step.chunks),
        num_tokens=step.plan.num_tokens,
        planned=step.planned_at,
        launched=step.launched_at,
        queued=step.queued_at,
        awaited=awaited,
        completed=completed,
        accepted=accepted,
        device_start=device_start,
        device_end=device_end,
    )


class StepLog:
    """Takes the times of each step. `trace`: a file that gets them all, else the last RING_STEPS
    are kept. Raises ConfigError for a file that cannot be written."""

    def __init__(self, trace: str | None = None) -> None:
        self._recent: deque[StepTimes] = deque(maxlen=RING_STEPS)
        self._file = None if trace is None else TraceFile(Path(trace))

    def add(self, times: StepTimes) -> None:
        """The step has completed."""
        self._recent.append(times)
        if self._file is not None:
            self._file.add(times)

    @property
    def recent(self) -> list[StepTimes]:
        """The last steps, the oldest first."""
        return list(self._recent)

    def flush(self) -> None:
        """Brings the file up to date, as when nothing is left to do."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Ends the file. Idempotent."""
        if self._file is not None:
            self._file.close()


class TraceFile:
    """A trace in Chrome's format, written while the steps run. Viewers also read one that was cut
    off: the format lets the closing bracket be missing.

    A disk that is full ends the trace and nothing else."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO | None = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--trace {path}: {error.strerror}") from error
        self._waiting: list[StepTimes] = []
        self._device_end = math.nan  # of the step before
        self._write(b"[\n" + _lines(row_names()))

    def add(self, times: StepTimes) -> None:
        """Of the next step."""
        self._waiting.append(times)
        if len(self._waiting) >= _FLUSH_STEPS:
            self.flush()

    def flush(self) -> None:
        """Writes what has been added."""
        if not self._waiting:
            return
        lines = _lines(step_events(self._waiting, self._device_end))
        self._device_end = self._waiting[-1].device_end
        self._waiting.clear()
        self._write(b",\n" + lines)

    def close(self) -> None:
        """Writes the end. Idempotent."""
        self.flush()
        self._write(b"\n]\n")
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            log.warning("the trace ends here: %s", error)
            self._file = None


def _lines(events: Iterable[Event]) -> bytes:
    return b",\n".join(msgspec.json.encode(event) for event in events)
