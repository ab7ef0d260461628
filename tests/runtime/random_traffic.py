"""Random clients of one rig: aborts in every state, forced retraction, several choices, text stops,
deadlines and NaN rows, with every invariant after every step and every token compared."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from radix_runtime.scheduler.request import State
from tests.runtime.check_content import check_content
from tests.runtime.scheduler_rig import Rig


class Traffic:
    """Random clients of one rig."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.rng = random.Random(seed)
        self.np = np.random.default_rng(seed)
        self.shared = [self.np.integers(3, 97, 40) for _ in range(4)]
        self.made = 0
        self.open: set[str] = set()
        self.aborted_in: Counter[str] = Counter()

    def submit(self) -> None:
        rng = self.rng
        head = rng.choice(self.shared)[: rng.choice([0, 0, rng.randrange(41), 40])]
        ids = np.concatenate([head, self.np.integers(3, 97, rng.randint(1, 12))])
        rid = str(self.made)
        self.made += 1
        self.rig.submit(
            rid, ids,
            n=rng.choice([1, 1, 1, 2, 3]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.getrandbits(60),
            max_new_tokens=rng.choice([0, 1, rng.randint(2, 12), rng.randint(2, 60)]),
            ignore_eos=rng.random() < 0.4,
            stop_token_ids=[5, 6, 7] if rng.random() < 0.2 else [],
            stream=rng.random() < 0.5,
            stop=["x"] if rng.random() < 0.3 else [],
            extra_key=rng.choice([None, None, "tenant"]),
            return_logprob=rng.random() < 0.1,
            top_logprobs=2,
            repetition_penalty=1.5 if rng.random() < 0.1 else 1.0,
            logprob_start=rng.randrange(len(ids)) if rng.random() < 0.05 else -1,
            deadline=self.rig.clock.now + rng.random() * 40 if rng.random() < 0.05 else None,
        )  # fmt: skip
        self.open.add(rid)

    def disturb(self) -> None:
        rig, rng = self.rig, self.rng
        live = rig.scheduler.live
        if live and rng.random() < 0.08:
            running = [r.rid for r in rig.life.running]
            rid = rng.choice(running if running and rng.random() < 0.7 else list(live))
            self.aborted_in.update(r.state.name for r in live[rid])
            if rig.life.draining:
                self.aborted_in["DRAINING"] += 1
                rig.abort(rng.choice(rig.life.draining).rid)
            rig.abort(rid)
        if rng.random() < 0.04:
            rig.scheduler.retract_youngest()
        if live and rng.random() < 0.05:
            self.text_stop(rng.choice(list(live)))
        if rng.random() < 0.0005:
            rig.abort("")
        rig.clock.now += 0.05

    def text_stop(self, rid: str) -> None:
        for request in self.rig.scheduler.live[rid]:
            stream = self.rig.streams.get((rid, request.choice))
            if request.params.stop and stream and stream.ids and stream.finish is None:
                self.rig.text_stop(rid, request.choice, self.rng.randint(1, len(stream.ids)))
                return

    def settle(self) -> None:
        """Compares what has ended, then forgets it, as a client does."""
        for rid in [r for r in self.open if r not in self.rig.scheduler.live]:
            keys = [(rid, c) for c in range(self.rig.messages[rid].sampling.n)]
            if rid in self.rig.failed or all(k in self.rig.streams for k in keys):
                self.rig.verify(rid)
                self.open.discard(rid)


def drive(traffic: Traffic, requests: int) -> None:
    rig, rng = traffic.rig, traffic.rng
    bad_step = -1
    rig.engine.nan_rows = lambda step, row: step == bad_step and row == 0
    steps = 0
    counters = rig.scheduler.counters
    while (more := traffic.made - counters.num_refused_requests_total < requests) or traffic.open:
        # Mostly as many as are served; now and then a burst that the queue must refuse.
        if more and (len(rig.life.waiting) < 12 or rng.random() < 0.02):
            for _ in range(rng.choice([1, 2, 3, 40])):
                traffic.submit()
        traffic.disturb()
        happened = rig.step()
        steps += 1
        if steps % 997 == 0:
            bad_step = rig.engine.last_step + 2
        if steps % 64 == 0 or not happened:
            traffic.settle()
            check_content(rig.engine, rig.life.cache)
        assert steps < 100 * requests, "the scheduler does not come to rest"
    rig.run()


def check_end(traffic: Traffic) -> None:
    """Nothing is left, and every request is accounted for."""
    rig = traffic.rig
    counters = rig.scheduler.counters
    rig.verify_rest()
    ended = counters.num_finished_requests_total + counters.num_aborted_requests_total
    assert ended + counters.num_failed_requests_total == counters.num_requests_total


def check_coverage(traffic: Traffic) -> None:
    """Of many requests: most came to their end, aborts met every state, some were retracted."""
    counters = traffic.rig.scheduler.counters
    assert counters.num_finished_requests_total > counters.num_requests_total // 3
    assert traffic.aborted_in.keys() >= {State.WAITING.name, State.DECODE.name}
    assert counters.num_retractions_total > counters.num_requests_total // 200


def traffic_of(seed: int, **options: object) -> Traffic:
    print(f"seed {seed}")
    rig = Rig(rows=8, schedule_conservativeness=0.2, max_queued_requests=40, **options)
    return Traffic(rig, seed)
