"""What a step took, and traces of steps in the format of chrome://tracing and Perfetto."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

RING_STEPS = 2048  # the scheduler remembers
# Rows of the picture, by the number that Chrome's format has for threads.
SCHEDULER_ROW = 1
DEVICE_ROW = 2
_ROW_NAMES = {SCHEDULER_ROW: "scheduler", DEVICE_ROW: "device"}
_PROCESS = 1


class StepTimes(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One step: what it did, and when, in seconds of the scheduler's clock.

    Of the host: planning began (`planned`), the plan went to the engine (`launched`), which had
    taken it (`queued`); the host waited for the result (`awaited`), had it (`completed`), and had
    handed its tokens on (`accepted`). Of the device: `device_start` and `device_end`, NaN where the
    engine does not tell."""

    step_id: int
    num_decode: int  # rows that continue
    num_chunks: int  # chunks of prompts
    num_tokens: int  # tokens that the step ran
    planned: float
    launched: float
    queued: float
    awaited: float
    completed: float
    accepted: float
    device_start: float = math.nan
    device_end: float = math.nan

    @property
    def name(self) -> str:
        """What the step did, in a few words: "decode 64", "prefill 2048", "mixed 64 + 448"."""
        if not self.num_chunks:
            return f"decode {self.num_decode}"
        if not self.num_decode:
            return f"prefill {self.num_tokens}"
        return f"mixed {self.num_decode} + {self.num_tokens - self.num_decode}"


Event = dict[str, Any]


def chrome_trace(steps: Iterable[StepTimes]) -> bytes:
    """A whole trace of these steps, as JSON."""
    return msgspec.json.encode({"traceEvents": [*row_names(), *step_events(steps)]})


def step_events(steps: Iterable[StepTimes], device_end: float = math.nan) -> Iterator[Event]:
    """The events of steps that follow each other. `device_end`: of the step before the first."""
    for step in steps:
        yield _span(SCHEDULER_ROW, "plan", step.planned, step.launched, step)
        yield _span(SCHEDULER_ROW, "launch", step.launched, step.queued, step)
        yield _span(SCHEDULER_ROW, "wait", step.awaited, step.completed, step)
        yield _span(SCHEDULER_ROW, "results", step.completed, step.accepted, step)
        if not math.isnan(step.device_start):
            event = _span(DEVICE_ROW, step.name, step.device_start, step.device_end, step)
            if not math.isnan(device_end):
                event["args"]["gap_us"] = _microseconds(step.device_start - device_end)
            yield event
        device_end = step.device_end


def _span(row: int, name: str, start: float, end: float, step: StepTimes) -> Event:
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": row,
        "name": name,
        "ts": _microseconds(start),
        "dur": _microseconds(end - start),
        "args": {
            "step": step.step_id,
            "decode_rows": step.num_decode,
            "chunks": step.num_chunks,
            "tokens": step.num_tokens,
        },
    }


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def row_names() -> list[Event]:
    """The events that name the rows of the picture."""
    return [
        {
            "ph": "M",
            "pid": _PROCESS,
            "tid": row,
            "name": "thread_name",
            "args": {"name": name},
        }
        for row, name in _ROW_NAMES.items()
    ]
