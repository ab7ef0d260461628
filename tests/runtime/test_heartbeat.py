"""The shared page of heartbeats, and what is concluded from it."""

from __future__ import annotations

import os

import pytest

from radix_runtime.server import heartbeat
from radix_runtime.server.heartbeat import Heartbeats


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(heartbeat.time, "monotonic_ns", lambda: int(self.now * 1e9))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_longest_silence_is_named(clock: Clock) -> None:
    beats = Heartbeats()
    assert beats.stale() is None, "nobody has begun"
    other = Heartbeats(os.dup(beats.descriptor))  # as a child maps it
    other.beat("api")
    clock.now += 6
    other.beat("detokenizer")
    clock.now += 5
    assert beats.stale(10.9) == "api" and beats.stale(11.1) is None
    other.beat("api")
    assert beats.stale() is None


def test_a_hang_is_a_step_that_does_not_complete(clock: Clock) -> None:
    beats = Heartbeats()

    def seen(since: float | None) -> float:
        beats.watch_step(since)
        return beats.step_seconds

    assert seen(None) == 0 and beats.stale(0) is None, "idle: the loop beats for itself"
    start = clock.now
    assert seen(start) == 0
    clock.now += 20
    assert seen(start) == pytest.approx(20)
    assert beats.stale() is None, "who waits for a long step is alive"
    clock.now += 20
    assert beats.step_seconds == pytest.approx(20), "a stopped process tells nothing new"
    assert beats.stale() == "scheduler"
    assert seen(clock.now - 1) == pytest.approx(1) and seen(None) == 0
