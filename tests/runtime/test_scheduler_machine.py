"""Hypothesis drives allocator, cache, policy and scheduler; it finds the short sequence."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.runtime.check_content import check_content
from tests.runtime.fake_model import FakeModel
from tests.runtime.scheduler_rig import Rig

PROMPTS = [3 + (np.arange(60) * k) % 89 for k in (1, 1, 7)]
PROMPTS[1] = np.concatenate([PROMPTS[0][:17], PROMPTS[2][:43]])  # shares 17 tokens with the first


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        rows=st.integers(1, 4),
        chunk=st.sampled_from([3, 8, 20, -1]),
        overlap=st.booleans(),
        lazy=st.booleans(),
        cache=st.booleans(),
        policy=st.sampled_from(["fcfs", "lpm"]),
        eviction=st.sampled_from(["lru", "lfu", "fifo"]),
        trust=st.sampled_from([0.0, 1.0]),
        samples=st.sampled_from([1, 4]),
        model=st.sampled_from([FakeModel(), FakeModel(window=7), FakeModel(recurrent=True)]),
        host_pages=st.sampled_from([0, 0, 12]),
    )
    def start(
        self, page_size: int, rows: int, chunk: int, overlap: bool, lazy: bool, cache: bool,
        policy: str, eviction: str, trust: float, samples: int, model: FakeModel,
        host_pages: int,
    ) -> None:  # fmt: skip
        self.count = 0
        self.rig = Rig(
            page_size=page_size, pages=96 // page_size, rows=rows, chunk=chunk, context=80,
            overlap=overlap, lazy=lazy, samples=samples, model=model,
            group_sizes=(96, 20), host_pages=host_pages, radix_eviction_policy=eviction,
            disable_radix_cache=not cache, schedule_policy=policy if cache else "fcfs",
            schedule_conservativeness=trust, max_queued_requests=6,
        )  # fmt: skip

    @rule(
        which=st.integers(0, 2), length=st.integers(1, 60), new=st.integers(0, 20),
        n=st.sampled_from([1, 1, 2]), key=st.sampled_from([None, "k"]), stops=st.booleans(),
        late=st.sampled_from([None, None, 3.0]), start=st.sampled_from([-1, -1, 0, 2]),
    )  # fmt: skip
    def submit(
        self, which: int, length: int, new: int, n: int, key: str | None, stops: bool,
        late: float | None, start: int,
    ) -> None:  # fmt: skip
        self.count += 1
        self.rig.submit(
            str(self.count), PROMPTS[which][:length], max_new_tokens=new, n=n, extra_key=key,
            seed=self.count % 3, temperature=1.0, stop=["x"] if stops else [], stream=not stops,
            deadline=late and self.rig.clock.now + late, logprob_start=min(start, length),
        )  # fmt: skip

    @rule(n=st.integers(1, 6))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.rig.step()

    @precondition(lambda self: self.rig.messages)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.rig.abort(data.draw(st.sampled_from(sorted(self.rig.messages))))

    @rule()
    def retract(self) -> None:
        self.rig.scheduler.retract_youngest()

    @rule(data=st.data())
    def text_stop(self, data: st.DataObject) -> None:
        open_streams = [
            (key, stream)
            for key, stream in self.rig.streams.items()
            if stream.finish is None and stream.ids and key[0] not in self.rig.failed
        ]
        if open_streams:
            key, stream = data.draw(st.sampled_from(open_streams))
            self.rig.text_stop(*key, data.draw(st.integers(1, len(stream.ids))))

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    @rule()
    def flush_cache(self) -> None:
        idle = self.rig.scheduler.is_idle and not self.rig.inbox._messages
        flushed = self.rig.flush_cache()
        assert flushed or not idle

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "rig"):
            self.rig.scheduler.check()
            check_content(self.rig.engine, self.rig.life.cache)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.run(5000)
            self.rig.verify_all()


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachine = SchedulerMachine.TestCase
