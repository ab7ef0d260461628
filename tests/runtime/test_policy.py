from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_runtime import registry
from radix_runtime.config import ServerArgs
from radix_runtime.errors import ConfigError
from radix_runtime.memory.radix_check import check_tree
from radix_runtime.messages import Generate, pack_ids
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.scheduler import policy
from radix_runtime.scheduler.batch_builder import build_step
from radix_runtime.scheduler.decision import Decision
from radix_runtime.scheduler.lifecycle import Lifecycle
from radix_runtime.scheduler.policy import OutputRatio, QueueContext, plan_step
from radix_runtime.scheduler.request import Request, State

SEQ = iter(range(10**9))


def request(ids: object, new: int = 10, arrival: float = 0.0) -> Request:
    message = Generate(
        rid="r", input_ids=pack_ids(ids), sampling=SamplingParams(max_new_tokens=new)
    )
    waiting = Request(
        message,
        choice=0,
        seq=next(SEQ),
        arrival=arrival,
        seed=0,
        max_total_len=len(ids) + new,
        stop_ids=frozenset(),
    )
    waiting.move(State.WAITING)
    return waiting


class Host:
    """Lifecycle plus planning, without a loop: steps complete as soon as they are built."""

    def __init__(
        self, pages: int = 64, size: int = 4, rows: int = 8, budget: int = 32, ratio: float = 0.0
    ) -> None:
        self.life = Lifecycle(
            num_pages=pages,
            page_size=size,
            max_rows=rows,
            max_len=pages * size,
            eviction="lru",
            sharing=True,
        )
        self.budget = budget
        self.ratio = ratio
        self.steps = 0
        self.samples = 1

    def plan(self) -> Decision:
        life = self.life
        return plan_step(
            life,
            lambda: life.waiting,
            free_rows=len(life.table.free_rows),
            token_budget=self.budget,
            max_samples=self.samples,
            ratio=self.ratio,
        )

    def run(self) -> Decision:
        decision = self.plan()
        build_step(decision, self.steps, self.life)
        self.life.completed_step = self.steps
        self.steps += 1
        streams = decision.decode
        for row, count in zip(streams.rows, streams.num_samples, strict=True):
            for _ in range(count):
                self.life.rows.request(row).append(5)
        for entry in decision.chunks:
            self.life.share(entry.request, entry.end)
            for _ in range(entry.num_samples):
                entry.request.append(5)
        return decision

    def wait(self, requests: Iterable[Request]) -> None:
        """They wait behind those that wait already."""
        for waiting in requests:
            self.life.waiting.append(waiting)


def test_planning_changes_nothing() -> None:
    host = Host()
    host.life.waiting.append(request(range(20)))
    host.run()
    host.life.waiting.append(request([*range(10), 90, 91]))
    before = host.life.allocator.num_free, host.life.cache.evictable_pages, len(host.life.waiting)
    states = [(r.state, r.computed_len, r.num_pages) for r in host.life.running]
    first, second = host.plan(), host.plan()
    assert [c.end - c.start for c in first.chunks] == [c.end - c.start for c in second.chunks]
    after = host.life.allocator.num_free, host.life.cache.evictable_pages, len(host.life.waiting)
    assert before == after
    assert states == [(r.state, r.computed_len, r.num_pages) for r in host.life.running]
    check_tree(host.life.cache)


def test_streams_first_then_chunks_fill_the_budget() -> None:
    host = Host(budget=16, pages=100)
    for i in range(3):
        host.life.waiting.append(request([i]))
    host.run()
    long, longer = request(range(20, 40)), request(range(50, 90))
    host.wait([long, longer])
    decision = host.run()
    assert len(decision.decode) == 3
    assert [(c.request, c.end - c.start) for c in decision.chunks] == [(long, 13)]
    decision = host.run()
    assert [(c.request, c.end - c.start) for c in decision.chunks] == [(long, 7), (longer, 6)]
    decision = host.run()
    assert len(decision.decode) == 4 and decision.chunks[0].end - decision.chunks[0].start == 12


def test_more_streams_than_budget_all_get_their_token() -> None:
    host = Host(budget=8, pages=100)
    for i in range(8):
        host.life.waiting.append(request([i]))
    host.run()
    host.budget = 4
    host.life.waiting.append(request([50]))
    decision = host.run()
    assert len(decision.decode) == 8 and not decision.chunks


@pytest.mark.parametrize("left", range(1, 12))
@pytest.mark.parametrize("most", range(-1, 13))
def test_no_chunk_is_of_one_token_and_none_leaves_one(left: int, most: int) -> None:
    length = policy.chunk_length(left, most)
    if length <= 0:
        assert most <= 0 or (most < 3 and left > 1)
    else:
        assert length <= min(left, most) and (left == 1 or 1 not in (length, left - length))


def test_a_prompt_waits_for_a_budget_of_more_than_one_token() -> None:
    host = Host(budget=4, pages=100)
    host.wait([request([1]), request([2]), request([3])])
    host.run()
    host.life.waiting.append(request([50, 51, 52]))
    assert not host.run().chunks  # one token beside the streams
    host.life.end(host.life.running[0])
    assert not host.run().chunks  # two would leave one
    host.life.end(host.life.running[0])
    assert [c.end - c.start for c in host.run().chunks] == [3]


def test_two_tokens_of_a_cached_prompt_are_computed() -> None:
    host = Host(size=4, budget=100)
    for tokens, cached in ((9, 0), (8, 4), (9, 4), (10, 8), (1, 0), (2, 0)):
        host.life.waiting.append(request(range(tokens), new=1))
        (one,) = host.run().chunks
        assert one.match is not None and (one.match.length, one.end) == (cached, tokens)
        host.life.end(one.request)


def test_a_shortage_is_reported_before_anything_is_taken() -> None:
    host = Host(pages=4, size=4)
    host.wait([request(range(8), new=8), request(range(50, 57), new=8)])
    host.ratio = 0.0
    decision = host.run()
    assert len(decision.chunks) == 1  # one page more than it has now is set aside
    (other,) = host.life.waiting
    host.life.admit(other, host.life.cache.match(other.ids[:0]))
    step = Decision(chunks=[policy.chunk(other, 0, 7)])
    build_step(step, host.steps, host.life)
    other.append(5)
    assert host.plan().shortage


def test_a_starved_chunk_takes_what_is_there_and_admits_nobody() -> None:
    host = Host(pages=6, size=4, budget=12)
    first = request(range(20), new=1)
    host.life.waiting.append(first)
    host.run()
    host.life.allocator.alloc(2)  # somebody else's
    host.life.waiting.append(request([70], new=1))
    decision = host.run()
    assert [(c.request, c.end - c.start) for c in decision.chunks] == [(first, 4)]
    decision = host.plan()
    assert decision.shortage and not decision


def test_admission_counts_whole_pages_and_what_it_would_lock() -> None:
    host = Host(pages=10, size=16, rows=8, budget=1000, ratio=1.0)
    host.wait(request(np.arange(10) + 12 * i, new=9) for i in range(8))
    decision = host.run()
    assert len(decision.chunks) == 5  # two pages each
    host = Host(pages=8, size=4, budget=1000, ratio=1.0)
    donor = request(range(16), new=1)
    host.life.waiting.append(donor)
    host.run()
    host.life.end(donor)
    assert host.life.cache.evictable_pages == 4 and host.life.allocator.num_free == 4
    # Both use the four cached pages; they need four and two more.
    host.life.waiting.append(request([*range(16), *range(50, 60)], new=6))
    host.life.waiting.append(request([*range(16), *range(70, 74)], new=3))
    decision = host.plan()
    assert [c.match.length for c in decision.chunks] == [16]


def test_admission_of_sharers_counts_the_shared_pages_once() -> None:
    host = Host(pages=8, size=4, budget=1000, ratio=1.0)
    donor = request(range(16), new=1)
    host.life.waiting.append(donor)
    host.run()
    host.life.end(donor)
    for i in (50, 60, 70):
        host.life.waiting.append(request([*range(16), i, i], new=2))
    assert len(host.plan().chunks) == 3


def test_nobody_passes_a_request_that_does_not_fit() -> None:
    host = Host(pages=8, size=4, budget=1000, ratio=1.0)
    host.life.waiting.append(request(range(16), new=4))
    host.run()
    host.wait([request(range(50, 66), new=4), request([90], new=1)])
    assert not host.plan().chunks


def test_only_pages_that_can_be_reused_are_waited_for() -> None:
    host = Host(size=4, budget=1000)
    ids = list(range(8))
    host.wait([request(ids), request(ids), request([*ids, 9, 9])])
    decision = host.run()
    # The second cannot reuse its last page (two tokens must be computed) but can the first page.
    assert len(decision.chunks) == 1 and decision.dedup_waits == 2
    decision = host.run()
    assert [c.match.length for c in decision.chunks] == [4, 8]


def test_a_long_queue_behind_one_prefix_is_not_walked_to_its_end() -> None:
    host = Host(pages=10_000, size=4, rows=1000, budget=10_000)
    shared = list(range(40))
    host.wait([request(shared), request([90] * 12), *(request([*shared, i]) for i in range(300))])
    host.wait([request([91] * 12), request([92] * 12)])
    decision = host.run()
    assert decision.dedup_waits == policy.MOST_WAITS == 256
    assert [c.request.ids[0] for c in decision.chunks] == [0, 90]
    # Only waits in a row count.
    queue = list(host.life.waiting)
    host.life.waiting.clear()
    host.wait([*queue[:100], request([93] * 12), *queue[100:]])
    host.life.running[0].prefill_end = 0
    decision = host.run()
    assert len(decision.chunks) == 303 and decision.dedup_waits == 0


def expected_len(waiting: Request, ratio: float, margin: int) -> int:
    lengths = np.array([waiting.total_len]), np.array([waiting.max_total_len])
    (expected,) = policy.expected_len(*lengths, ratio, margin).tolist()
    return expected


def test_expected_length_has_room_for_a_page_and_no_more_than_allowed() -> None:
    r = request(range(10), new=100)
    assert expected_len(r, 0.0, 16) == 26
    assert expected_len(r, 0.5, 16) == 60
    assert expected_len(r, 1.0, 16) == 110
    assert expected_len(request(range(10), new=3), 0.0, 16) == 13
    assert expected_len(request(range(10), new=10**6), 1.0, 16) == 10 + 4096
    expect = policy.Expectation(ratio=0.5, margin=16, page_size=16)
    assert expect.pages(r) == 4


def test_output_ratio_sinks_to_its_floor_and_rises_on_retraction() -> None:
    ratio = OutputRatio(1.0)
    start = ratio.value
    for _ in range(10_000):
        ratio.after_step()
    assert ratio.value == pytest.approx(0.1 * start)
    r = request(range(4), new=10)
    r.total_len += 9
    ratio.after_retraction([r])
    assert ratio.value == 1.0
    assert OutputRatio(0.0).value == 0.0 and OutputRatio(9.0).value == 1.0


def order(name: str, waiting: list[Request], lengths: dict[Request, int], now: float) -> list[int]:
    context = QueueContext(
        now=now, age_bound=5.0, prefix_length=lambda request: lengths.get(request, 0)
    )
    return [waiting.index(r) for r in policy.schedule_policies.get(name)(waiting, context)]


def test_order_of_the_queue() -> None:
    waiting = [request([1], arrival=float(t)) for t in (0, 4, 5, 6)]
    lengths = {waiting[1]: 1, waiting[2]: 8, waiting[3]: 8}
    assert order("fcfs", waiting, lengths, 0.0) == [0, 1, 2, 3]
    assert order("lpm", waiting, lengths, 4.9) == [2, 3, 1, 0]
    assert order("lpm", waiting, lengths, 5.0) == [0, 2, 3, 1]
    assert order("lpm", waiting, lengths, 9.5) == [0, 1, 2, 3]
    waiting[3].retractions = 1
    assert order("lpm", waiting, lengths, 0.0) == [3, 2, 1, 0]


def test_policies_are_found_by_name_and_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "newest"

        def load(self) -> policy.SchedulePolicy:
            return lambda waiting, context: list(waiting)[::-1]

    asked = []

    def entry_points(group: str, name: str = "newest") -> list[Entry]:
        asked.append(group)
        return [Entry()] if name == "newest" else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(
        policy.schedule_policies, "_items", {"fcfs": policy.fcfs, "lpm": policy.lpm}
    )
    waiting = [request([1]), request([2])]
    assert order("newest", waiting, {}, 0.0) == [1, 0]
    assert asked == ["radix.schedule_policies"]
    with pytest.raises(ConfigError, match="fcfs, lpm, newest"):
        policy.schedule_policies.get("sjf")
    ServerArgs(schedule_policy="mine").validate()  # the name is looked up at start


def end_finished(host: Host) -> None:
    for stream in list(host.life.running):
        if stream.state is State.DECODE and stream.total_len == stream.max_total_len:
            host.life.end(stream)


def advance(host: Host) -> bool:
    """One step, or one retraction where pages are missing; False: there is nothing to do."""
    decision = host.plan()
    if decision.shortage:
        host.life.retract(max(host.life.running, key=lambda r: r.seq))
        return True
    if not decision:
        return False
    tokens = len(decision.decode) + sum(c.end - c.start for c in decision.chunks)
    assert tokens <= max(host.budget, len(decision.decode))
    assert all(c.end - c.start >= 1 for c in decision.chunks)
    host.run()  # raises when pages or rows are missing
    end_finished(host)
    check_tree(host.life.cache)
    return True


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_plan_always_fits_its_pages_rows_and_tokens(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 3, 16]))
    host = Host(
        pages=data.draw(st.integers(4, 20)), size=size, rows=data.draw(st.integers(1, 4)),
        budget=data.draw(st.integers(3, 40)), ratio=data.draw(st.sampled_from([0.0, 0.5])),
    )  # fmt: skip
    host.samples = data.draw(st.sampled_from([1, 4]))
    limit = host.life.allocator.num_pages * size
    for _ in range(25):
        if data.draw(st.booleans()) and limit > 2:
            n = data.draw(st.integers(1, limit - 1))
            new = data.draw(st.integers(1, limit - n))
            host.life.waiting.append(request([i % 7 for i in range(n)], new))
        advance(host)
    # Whatever is left comes to its end: nothing waits for ever.
    for _ in range(5000):
        if not host.life.running and not host.life.waiting:
            return
        assert advance(host), "requests wait and nothing runs"
    raise AssertionError("the queue does not empty")


def test_policy_and_memory_load_no_torch() -> None:
    import subprocess

    code = (
        "import sys\n"
        "import radix_runtime.scheduler.policy, radix_runtime.scheduler.scheduler\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
