"""`radix bench steps`: what a trace of steps says, by kind of step."""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..step_times import DEVICE_ROW, SCHEDULER_ROW

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The steps of one kind: medians in microseconds.

    `gap`: from the end of the step before on the device to the start of these, of which `gap_p99`
    is the 99th percentile; `idle`: the sum of the gaps over the time from end to end. Of the
    device None where the trace does not tell."""

    name: str
    steps: int
    device: float | None
    gap: float | None
    gap_p99: float | None
    idle: float | None
    plan: float
    launch: float
    wait: float
    results: float


def steps(namespace: argparse.Namespace) -> None:
    """Prints a line for each kind of step, the most frequent first. Raises ConfigError."""
    found = summaries(Path(namespace.trace))
    print("\n".join(lines(found)))
    if namespace.json is not None:
        report = [asdict(summary) for summary in found]
        namespace.json.write_text(json.dumps(report, indent=1) + "\n")


def summaries(trace: Path) -> list[StepSummary]:
    """By kind of step, the most frequent first. `trace`: what --trace or /step_trace wrote; it may
    be cut off. Raises ConfigError."""
    by_kind: defaultdict[str, list[dict[str, Event]]] = defaultdict(list)
    for parts in _by_step(_read(trace)).values():
        if parts.keys() >= {"plan", "launch", "wait", "results"}:
            by_kind[_kind(parts)].append(parts)
    found = [_summary(name, of_kind) for name, of_kind in by_kind.items()]
    return sorted(found, key=lambda summary: -summary.steps)


def _read(trace: Path) -> list[Event]:
    try:
        text = trace.read_text()
    except OSError as error:
        raise ConfigError(f"{trace}: {error.strerror}") from error
    for end in ("", "]"):
        try:
            events = json.loads(text + end)
        except ValueError:
            continue
        events = events["traceEvents"] if isinstance(events, dict) else events
        return [event for event in events if event.get("ph") == "X"]
    raise ConfigError(f"{trace} is no trace in Chrome's format")


def _by_step(events: Sequence[Event]) -> dict[int, dict[str, Event]]:
    """The parts of each step by their names, its time on the device as "device"."""
    found: defaultdict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        step = event.get("args", {}).get("step")
        if step is None:
            continue
        if event["tid"] == DEVICE_ROW:
            found[step]["device"] = event
        elif event["tid"] == SCHEDULER_ROW:
            found[step][event["name"]] = event
    return found


def _kind(parts: dict[str, Event]) -> str:
    told = parts["plan"]["args"]
    if told["chunks"] == 0:
        return f"decode {told['decode_rows']}"
    return "prefill" if told["decode_rows"] == 0 else "mixed"


def _summary(name: str, steps: Sequence[dict[str, Event]]) -> StepSummary:
    device = [parts["device"] for parts in steps if "device" in parts]
    followed = [event for event in device if "gap_us" in event["args"]]
    gaps = [event["args"]["gap_us"] for event in followed]
    whole = sum(gaps) + sum(event["dur"] for event in followed)
    host = {
        part: statistics.median(parts[part]["dur"] for parts in steps)
        for part in ("plan", "launch", "wait", "results")
    }
    return StepSummary(
        name=name,
        steps=len(steps),
        device=statistics.median(event["dur"] for event in device) if device else None,
        gap=statistics.median(gaps) if gaps else None,
        gap_p99=sorted(gaps)[int(0.99 * (len(gaps) - 1))] if gaps else None,
        idle=sum(gaps) / whole if whole > 0 else None,
        **host,
    )


_COLUMNS = ("device", "gap", "gap_p99", "plan", "launch", "wait", "results")


def lines(found: Sequence[StepSummary]) -> list[str]:
    """The table as text; medians in microseconds."""
    heading = f"{'us':14} {'steps':>7} {'idle':>7}"
    text = [heading + "".join(f" {column.replace('_', ' '):>10}" for column in _COLUMNS)]
    for summary in found:
        idle = "-" if summary.idle is None else f"{summary.idle:.1%}"
        cells = [_cell(getattr(summary, column)) for column in _COLUMNS]
        text.append(f"{summary.name:14} {summary.steps:7} {idle:>7}" + "".join(cells))
    return text


def _cell(value: float | None) -> str:
    return f" {'-':>10}" if value is None else f" {value:10,.1f}"
