"""The shared page of heartbeats, and what is concluded from it."""

from __future__ import annotations

import os

import pytest

from radix_runtime.processes import heartbeat
from radix_runtime.processes.heartbeat import Heartbeats

PROCESSES = ("detokenizer/0", "scheduler/0", "scheduler/1", "api/0")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(heartbeat.time, "monotonic_ns", lambda: int(self.now * 1e9))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_longest_silence_is_named(clock: Clock) -> None:
    beats = Heartbeats(PROCESSES)
    assert beats.stale() is None, "nobody has begun"
    other = Heartbeats(PROCESSES, os.dup(beats.descriptor))  # as a child maps it
    other.beat("api/0")
    clock.now += 6
    other.beat("detokenizer/0")
    clock.now += 5
    assert beats.stale(10.9) == "api/0" and beats.stale(11.1) is None
    other.beat("api/0")
    assert beats.stale() is None


def test_a_hang_is_a_step_that_does_not_complete(clock: Clock) -> None:
    beats = Heartbeats(PROCESSES)

    def seen(since: float | None) -> float:
        beats.watch_step("scheduler/0", since)
        return beats.step_seconds

    assert seen(None) == 0 and beats.stale(0) is None, "idle: the loop beats for itself"
    start = clock.now
    assert seen(start) == 0
    clock.now += 20
    assert seen(start) == pytest.approx(20)
    assert beats.stale() is None, "who waits for a long step is alive"
    clock.now += 20
    assert beats.step_seconds == pytest.approx(20), "a stopped process tells nothing new"
    assert beats.stale() == "scheduler/0"
    assert seen(clock.now - 1) == pytest.approx(1) and seen(None) == 0


def test_the_longest_step_of_all_engines_counts(clock: Clock) -> None:
    beats = Heartbeats(PROCESSES)
    beats.watch_step("scheduler/0", clock.now - 3)
    beats.watch_step("scheduler/1", clock.now - 5)
    assert beats.step_seconds == pytest.approx(5)
    beats.watch_step("scheduler/1", None)
    assert beats.step_seconds == pytest.approx(3)


def test_who_has_ended_is_neither_silent_nor_in_a_step(clock: Clock) -> None:
    beats = Heartbeats(PROCESSES)
    beats.watch_step("scheduler/0", clock.now - 3)
    clock.now += 20
    assert beats.stale() == "scheduler/0"
    beats.clear("scheduler/0")
    assert beats.stale() is None and beats.step_seconds == 0
