"""The shared page of heartbeats, and what is concluded from it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from radix_runtime.server import heartbeat
from radix_runtime.server.heartbeat import CountingExecutor, Heartbeats, StepWatch
from radix_runtime.step_plan import StepPlan
from tests.runtime.fake_engine import FakeEngine


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
    assert beats.age("api") is None and beats.stale() is None
    other = Heartbeats(os.dup(beats.descriptor))  # as a child maps it
    other.beat("api")
    clock.now += 6
    other.beat("detokenizer")
    clock.now += 5
    assert beats.age("api") == pytest.approx(11)
    assert beats.stale() == "api" and beats.stale(12) is None
    other.beat("api")
    assert beats.stale() is None


def test_a_hang_is_steps_in_flight_without_progress(clock: Clock) -> None:
    beats = Heartbeats()
    watch = StepWatch(beats, 5)

    def after(seconds: float) -> bool:
        clock.now += seconds
        return watch.hung()

    assert not after(0) and not after(100), "idle is no hang"
    beats.step_launched()
    assert not after(1) and not after(5)
    beats.step_launched()  # overlap: two in flight, one comes
    beats.step_completed()
    assert not after(4) and not after(4)
    assert after(2)
    beats.step_completed()
    assert not after(0) and not after(100)


def test_steps_are_counted_once() -> None:
    beats = Heartbeats()
    engine = CountingExecutor(FakeEngine(), beats)
    assert engine.num_pages == FakeEngine().num_pages
    i32 = lambda *values: np.array(values, np.int32)  # noqa: E731
    plan = StepPlan(
        step_id=0, num_decode=0, rows=i32(0), query_len=i32(2), kv_len=i32(2),
        input_ids=i32(5, 6), source=i32(-1, -1), page_rows=i32(0), page_index=i32(0),
        page_ids=i32(3),
    )  # fmt: skip
    handle = engine.launch(plan)
    assert beats.steps == (0, 1)
    assert handle.result().step_id == 0
    assert beats.steps == (1, 0)
    engine.close()
