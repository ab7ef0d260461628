from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest

from radix_runtime.engine.step_ring import StepRing, StepRingReader
from radix_runtime.errors import EngineDeadError
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.step_plan import (
    LogprobSpan,
    RowSampling,
    StepPlan,
    deserialize_plan,
    serialize_plan,
)
from tests.child import IMPORT_PATH


def collect(ring, index, into, delay=lambda: 0.0):
    def main():
        reader = StepRingReader(ring.handle, index)
        while (frame := reader.receive()) is not None:
            into.append(frame)
            time.sleep(delay())

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    return thread


def close_when_read(ring):
    deadline = time.monotonic() + 60
    while min(ring._acks) < ring._published and time.monotonic() < deadline:
        time.sleep(0.001)
    ring.close()


@pytest.mark.parametrize("capacity", [1, 16, 77, 1 << 16])
def test_every_consumer_gets_every_frame_in_order(capacity):
    """Frames of nothing, around the size of the ring and of several rings; slow and fast
    consumers."""
    rng = random.Random(capacity)
    sizes = [0, 1, capacity - 9, capacity - 8, capacity, capacity + 1, 5 * capacity + 3]
    frames = [rng.randbytes(max(0, rng.choice(sizes))) for _ in range(60)]
    ring = StepRing(3, capacity)
    got = [[] for _ in range(3)]

    def slow():
        return 0.002 * rng.random()

    threads = [collect(ring, 0, got[0]), collect(ring, 1, got[1]), collect(ring, 2, got[2], slow)]
    for frame in frames:
        ring.publish(frame)
    deadline = time.monotonic() + 30
    while any(len(g) < len(frames) for g in got) and time.monotonic() < deadline:
        time.sleep(0.01)
    ring.close()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    ring.release()
    assert all(g == frames for g in got)


def test_a_consumer_that_stops_reading_is_named():
    ring = StepRing(2, capacity=17)
    reader = StepRingReader(ring.handle, 0)
    for step in range(2):
        ring.publish(b"x" * step)
        assert reader.receive() == b"x" * step
    with pytest.raises(EngineDeadError, match="worker rank 2 took no step in 0.1 s"):
        ring.publish(b"y", timeout=0.1)
    ring.release()


def test_close_ends_readers_and_writer():
    ring = StepRing(1, capacity=64)
    got = []
    thread = collect(ring, 0, got)
    time.sleep(0.1)
    ring.close()
    thread.join(60)
    assert not thread.is_alive() and got == []
    with pytest.raises(EngineDeadError, match="closed"):
        ring.publish(b"z")
    ring.release()


@pytest.mark.serial
def test_waiting_uses_no_processor():
    ring = StepRing(1)
    reader = StepRingReader(ring.handle, 0)
    threading.Timer(1.0, ring.publish, args=[b"late"]).start()
    before = resource.getrusage(resource.RUSAGE_THREAD)
    assert reader.receive() == b"late"
    after = resource.getrusage(resource.RUSAGE_THREAD)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 0.2
    ring.release()


_CHILD = """
import sys, msgspec
from radix_runtime.engine.step_ring import RingHandle, StepRingReader
reader = StepRingReader(msgspec.json.decode(sys.argv[1], type=RingHandle), 0)
while (frame := reader.receive()) is not None:
    sys.stdout.write(f"{len(frame)} {sum(frame)}\\n")
"""


def test_a_process_that_inherited_the_descriptors_reads():
    ring = StepRing(1, capacity=4096)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, msgspec.json.encode(ring.handle)],
        pass_fds=ring.handle.fds, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": IMPORT_PATH},
    )  # fmt: skip
    frames = [bytes([i % 251]) * (i * 397) for i in range(20)]
    for frame in frames:
        ring.publish(frame)
    close_when_read(ring)
    out, _ = child.communicate(timeout=60)
    assert out.decode().splitlines() == [f"{len(f)} {sum(f)}" for f in frames]
    ring.release()


def test_a_plan_crosses_unchanged():
    rng = np.random.default_rng(1)
    plan = StepPlan(
        step_id=2**40, num_decode=2,
        rows=rng.integers(0, 9, 5, dtype=np.int32), query_len=np.array([1, 1, 7, 3, 1], np.int32),
        kv_len=rng.integers(8, 99, 5, dtype=np.int32),
        input_ids=rng.integers(0, 9999, 11, dtype=np.int32),
        num_samples=np.array([1, 1, 0, 0, 1], np.int32),
        new_rows=[
            RowSampling(
                row=3,
                seed=-5,
                params=SamplingParams(seed=7, logit_bias={3: 1.5}),
                output_ids=b"abcd",
            )
        ],
        logprob_spans=[LogprobSpan(index=2, first=0, targets=b"12345678", top_n=2)],
    )  # fmt: skip
    ring = StepRing(1, capacity=64)
    got = []
    thread = collect(ring, 0, got)
    ring.publish(serialize_plan(plan))
    close_when_read(ring)
    thread.join(60)
    back = deserialize_plan(got[0])
    for name in StepPlan.__slots__:
        ours, theirs = getattr(plan, name), getattr(back, name)
        assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs
    ring.release()
