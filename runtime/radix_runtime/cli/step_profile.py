"""Where the time of decode steps went, out of a trace of torch's profiler in Chrome's format."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

_FORWARD = re.compile(r"forward \d+ tokens")
_SETTLING = 2  # steps at either end of the trace that do not count
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_DRIVER = ("cuda_runtime", "cuda_driver")
_MAX_NAME = 60

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What happened under one name: calls a step, and microseconds a step."""

    name: str
    calls: float
    microseconds: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A step, as the mean over `steps` steps; times in microseconds.

    `device`: kernels and copies. Where kernels overlap, one counts by how far it moved the end of
    the busy time, so that the parts and `device_idle` sum to the time seen on the device. `host`:
    spans of the thread that runs the steps, `driver`: its calls of the driver; both are larger than
    without a profiler.
    """

    steps: int
    period: float
    device_idle: float
    device: list[Part]
    host: list[Part]
    driver: list[Part]


def read_step_profile(trace: Path) -> StepProfile:
    """The decode steps of a trace: those between the most frequent kind of forward. Raises
    ConfigError when it has too few."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    spans = [e for e in events if e.get("cat") == "user_annotation"]
    names = Counter(e["name"] for e in spans if _FORWARD.fullmatch(e["name"]))
    usual = names.most_common(1)[0][0] if names else ""
    starts = sorted(float(e["ts"]) for e in spans if e["name"] == usual)
    if len(starts) < 2 * _SETTLING + 2:
        raise ConfigError(f"the trace {trace} has {len(starts)} steps of one kind: too few")
    starts = starts[_SETTLING : len(starts) - _SETTLING]
    first, last = starts[0], starts[-1]
    steps = len(starts) - 1
    inside = [e for e in events if first <= float(e["ts"]) < last]
    device, idle = _device_parts([e for e in inside if e.get("cat") in _DEVICE], steps)
    return StepProfile(
        steps=steps,
        period=(last - first) / steps,
        device_idle=idle,
        device=device,
        host=_sums((e for e in inside if e.get("cat") == "user_annotation"), steps),
        driver=_sums((e for e in inside if e.get("cat") in _DRIVER), steps),
    )


def _device_parts(events: list[Event], steps: int) -> tuple[list[Part], float]:
    """The parts of the device's time, and how long it waited, a step."""
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    idle = 0.0
    busy_until = None
    for event in sorted(events, key=lambda e: float(e["ts"])):
        start = float(event["ts"])
        end = start + float(event["dur"])
        if busy_until is None:
            busy_until = start
        idle += max(0.0, start - busy_until)
        name = short_name(event["name"])
        calls[name] += 1
        seconds[name] += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return _parts(seconds, calls, steps), idle / steps


def _sums(events: Iterable[Event], steps: int) -> list[Part]:
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for event in events:
        calls[event["name"]] += 1
        seconds[event["name"]] += float(event["dur"])
    return _parts(seconds, calls, steps)


def _parts(microseconds: dict[str, float], calls: Counter[str], steps: int) -> list[Part]:
    parts = [
        Part(name=name, calls=calls[name] / steps, microseconds=spent / steps)
        for name, spent in microseconds.items()
    ]
    return sorted(parts, key=lambda part: -part.microseconds)


def short_name(name: str) -> str:
    """A kernel's name without its namespaces, template arguments and parameters."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    base = re.split(r"[<(]", plain, maxsplit=1)[0]
    return (base.rpartition("::")[2] or plain).strip()[:_MAX_NAME]


def lines(profile: StepProfile) -> list[str]:
    """The table of a profile, as text."""
    found = [f"{profile.steps} steps of {profile.period:,.0f} us"]
    for title in ("device", "host", "driver"):
        for part in getattr(profile, title):
            found.append(_line(title, part.name, part.calls, part.microseconds, profile.period))
    if profile.device:
        waits = [e for e in found if e.startswith("  device")]
        row = _line("device", "(waits)", 1.0, profile.device_idle, profile.period)
        found.insert(1 + len(waits), row)
    return found


def _line(title: str, name: str, calls: float, microseconds: float, period: float) -> str:
    share = microseconds / period
    return f"  {title:7} {name:{_MAX_NAME}} {calls:7.1f} x {microseconds:10.1f} us {share:6.1%}"
