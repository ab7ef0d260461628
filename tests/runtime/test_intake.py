"""What the scheduler lets in, refuses, holds back, and ends from outside."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from radix_runtime.errors import InvariantViolation, refusal
from radix_runtime.scheduler.decision import Blocked
from radix_runtime.scheduler.request import Request, State
from tests.runtime.scheduler_rig import BOTH, Rig, prompt

# Refusals, deadlines, overload ----------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    rig = Rig(pages=16, context=100)  # 64 tokens of KV
    cases = [
        ("long", prompt(90), {"max_new_tokens": 11}, "context_length_exceeded"),
        ("full", prompt(100), {"max_new_tokens": None}, "context_length_exceeded"),
        ("pool", prompt(60), {"max_new_tokens": 5}, "kv_capacity_exceeded"),
        ("open", prompt(64), {"max_new_tokens": None}, "kv_capacity_exceeded"),
        ("empty", prompt(0), {}, "empty_input"),
        ("low", [3, -1], {}, "invalid_token_id"),
        ("high", [3, 97], {}, "invalid_token_id"),
        ("top_p", [3], {"top_p": 0.0}, "invalid_value"),
        ("nan", [3], {"temperature": float("nan")}, "invalid_value"),
        ("n", [3], {"n": 17}, "invalid_value"),
        ("start", [3], {"logprob_start": 2}, "invalid_value"),
        ("top", [3], {"top_logprobs": -1}, "invalid_value"),
        ("", [3], {}, "invalid_value"),
    ]
    for rid, ids, fields, code in cases:
        rig.submit(rid, ids, **fields)
        rig.step()
        assert (rig.failed[rid].status, rig.failed[rid].code) == (400, code)
    assert "65" not in rig.failed["long"].message and "100" in rig.failed["long"].message
    rig.submit("good", prompt(60), max_new_tokens=4)
    rig.run()
    rig.verify_all()


def test_the_queue_is_bounded() -> None:
    rig = Rig(rows=2, max_running_requests=2, max_queued_requests=3)
    for i in range(9):
        rig.submit(str(i), prompt(10), max_new_tokens=5)
    rig.step()
    refused = [str(i) for i in range(5, 9)]
    assert sorted(rig.failed) == refused
    for failure in rig.failed.values():
        assert (failure.status, failure.code) == (503, "engine_overloaded")
        assert 1 <= failure.retry_after <= 30
    rig.run()
    rig.verify_all()


@pytest.mark.parametrize("eos", [{1, 2, 97}, {1, 2, -1, 10**12}])
def test_end_ids_outside_of_the_vocabulary_are_dropped(
    eos: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(eos=frozenset(eos))
    assert rig.engine.vocab_size == 97
    [record] = caplog.records
    assert "end ids" in record.message and "97 ids" in record.message
    plans = rig.record_plans()
    rig.submit("a", prompt(9), max_new_tokens=6, min_new_tokens=3)
    rig.run()
    assert [row.stop_ids for plan in plans for row in plan.new_rows] == [[1, 2]]


def test_the_seed_of_the_operator_gives_the_requests_theirs() -> None:
    def tokens(seed: int | None, own: int | None = None) -> list[list[int]]:
        rig = Rig(random_seed=seed)
        for rid in "ab":
            rig.submit(rid, [3, 4, 5], max_new_tokens=8, temperature=1.0, ignore_eos=True, seed=own)
        rig.run()
        return [rig.streams[rid, 0].ids for rid in "ab"]

    first, second = tokens(7)
    assert [first, second] == tokens(7) != tokens(8)
    assert first != second and tokens(None) != tokens(None)
    assert tokens(7, own=1) == tokens(None, own=1)


def test_a_call_is_taken_as_a_whole() -> None:
    rig = Rig(rows=2, max_running_requests=2, max_queued_requests=3)

    def call(name: str, parts: int, n: int = 1) -> None:
        for i in range(parts):
            rig.submit(f"{name}{i}", prompt(10), max_new_tokens=5, n=n, call=(name, parts * n))

    call("small", 1)
    call("late", 5)  # would fit alone
    call("next", 4)
    rig.step()
    assert sorted(rig.failed) == [f"late{i}" for i in range(5)]
    assert {f.status for f in rig.failed.values()} == {503}
    rig.run()
    call("fits", 5)  # nobody waits
    rig.step()
    call("never", 3, n=2)
    rig.run()
    refused = {rid: f.status for rid, f in rig.failed.items() if not rid.startswith("late")}
    assert refused == {f"never{i}": 400 for i in range(3)}
    assert "6" in rig.failed["never0"].message and "5" in rig.failed["never0"].message
    rig.verify_all()


def test_no_call_waits_where_no_queue_is() -> None:
    rig = Rig(rows=2, max_running_requests=2, max_queued_requests=0)
    for i in range(3):
        rig.submit(str(i), prompt(10), max_new_tokens=9, ignore_eos=True)
        rig.step()
    assert {rid: f.status for rid, f in rig.failed.items()} == {"2": 503}
    rig.run()
    rig.verify_all()


def test_a_reused_id_ends_both_requests() -> None:
    rig = Rig()
    rig.submit("a", prompt(10), max_new_tokens=50)
    rig.step()
    rig.submit("a", prompt(10), max_new_tokens=50)
    rig.run()
    assert rig.failed["a"].code == "invalid_value"
    rig.verify_rest()


def test_deadlines_in_the_queue_and_while_running() -> None:
    rig = Rig(rows=1)
    rig.submit("runs", prompt(10), max_new_tokens=200, ignore_eos=True, deadline=105.0)
    rig.submit("waits", prompt(10), max_new_tokens=5, deadline=101.0)
    rig.submit("later", prompt(10), max_new_tokens=5, deadline=1000.0)
    for _ in range(4):
        rig.step()
    rig.clock.now = 102.0
    rig.step()
    assert rig.failed["waits"].status == 503 and "runs" not in rig.failed
    rig.clock.now = 106.0
    rig.run()
    assert rig.failed["runs"].status == 504
    assert {f.code for f in rig.failed.values()} == {"deadline_exceeded"}
    rig.verify("later")
    rig.verify_rest()


def test_flush_cache_only_when_nothing_runs() -> None:
    rig = Rig()
    ids = prompt(20)
    rig.submit("a", ids, max_new_tokens=3)
    assert not rig.flush_cache()
    rig.run()
    assert rig.life.cache.total_pages > 0
    assert rig.flush_cache()
    assert rig.life.allocator.num_free == rig.life.allocator.num_pages
    rig.submit("b", ids, max_new_tokens=3)
    rig.run()
    assert rig.streams["b", 0].cached_tokens == 0
    stats = rig.stats()
    assert stats["num_requests_total"] == 2 and stats["num_running_reqs"] == 0
    rig.verify_all()


# Requests that are held -----------------------------------------------------------------------


class Holder:
    """Keeps the requests whose id begins with "held" until the test lets them go."""

    def __init__(self, rig: Rig) -> None:
        self.futures: dict[str, Future[None]] = {}
        rig.scheduler.intake.hold = self.hold

    def hold(self, request: Request) -> Future[None] | None:
        if not request.rid.startswith("held"):
            return None
        return self.futures.setdefault(request.rid, Future())

    def release(self, rid: str) -> None:
        self.futures[rid].set_result(None)


def states(rig: Rig, rid: str) -> list[State]:
    return [request.state for request in rig.scheduler.live[rid]]


@BOTH
def test_a_held_request_owns_nothing_and_is_passed(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    holder = Holder(rig)
    rig.submit("held", prompt(20), max_new_tokens=5, n=2, seed=1, temperature=1.0)
    rig.submit("free", prompt(20), max_new_tokens=5)
    rig.run()
    rig.verify("free")
    assert states(rig, "held") == [State.PENDING, State.PENDING]
    assert not rig.scheduler.is_idle and not rig.flush_cache()
    stats = rig.stats()
    assert (stats["num_pending_reqs"], stats["num_queue_reqs"]) == (2, 0)
    assert stats["num_used_tokens"] == 0
    holder.release("held")
    rig.run()
    rig.verify_all()


@BOTH
def test_a_held_request_is_aborted_like_a_waiting_one(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    holder = Holder(rig)
    rig.submit("held", prompt(20), max_new_tokens=5, n=2)
    rig.step()
    rig.abort("held")
    rig.run()
    assert rig.streams["held", 0].finish.type == "abort" and not rig.life.pending
    holder.release("held")  # too late: nobody waits for it
    rig.run()
    rig.verify_all()


def test_a_held_request_expires_like_a_waiting_one() -> None:
    rig = Rig()
    Holder(rig)
    rig.submit("held", prompt(20), max_new_tokens=5, deadline=105.0)
    rig.step()
    rig.clock.now = 106.0
    rig.run()
    assert (rig.failed["held"].status, rig.failed["held"].code) == (503, "deadline_exceeded")
    rig.verify_rest()


def test_what_a_held_request_waited_for_fails() -> None:
    rig = Rig()
    holder = Holder(rig)
    for rid in ("held refused", "held broken", "held well"):
        rig.submit(rid, prompt(20), max_new_tokens=5, n=2)
    rig.step()
    holder.futures["held refused"].set_exception(refusal("invalid_value", "no such grammar"))
    holder.futures["held broken"].set_exception(OSError("a path of this machine"))
    holder.release("held well")
    rig.run()
    refused = rig.failed["held refused"]
    assert (refused.status, refused.message) == (400, "no such grammar")
    broken = rig.failed["held broken"]
    assert (broken.status, broken.code) == (500, "internal_error")
    assert "machine" not in broken.message
    assert rig.scheduler.counters.num_failed_requests_total == 4
    rig.verify_all()


def test_held_requests_count_in_the_queue_and_enter_it_as_they_are_released() -> None:
    rig = Rig(rows=1, max_running_requests=1, max_queued_requests=3)
    holder = Holder(rig)
    for rid in ("held a", "held b", "free", "held c", "late"):
        rig.submit(rid, prompt(10), max_new_tokens=3, ignore_eos=True)
    rig.step()
    assert list(rig.failed) == ["late"] and rig.failed["late"].status == 503
    holder.release("held b")
    rig.step()
    holder.release("held c")
    holder.release("held a")
    order: list[str] = []
    while rig.step():
        order += [rid for rid, _ in rig.streams if rid not in order]
    # Of those released at once the one that arrived first.
    assert order == ["free", "held b", "held a", "held c"]
    rig.verify_all()


def test_an_idle_scheduler_looks_often_while_a_request_is_held() -> None:
    rig = Rig(check="idle")
    holder = Holder(rig)
    rig.submit("held", prompt(10), max_new_tokens=3)
    waits: list[float | None] = []

    def wait(timeout: float | None) -> bool:
        waits.append(timeout)
        if len(waits) == 3:
            holder.release("held")
        return False

    rig.inbox.wait = wait  # type: ignore[method-assign]
    rig.scheduler.run(lambda: not rig.scheduler.live and len(waits) >= 3)
    assert waits == [0.005] * 3


def test_a_pending_request_without_a_container_is_a_violation() -> None:
    rig = Rig()
    Holder(rig)
    rig.submit("held", prompt(10), max_new_tokens=3)
    rig.step()
    rig.life.pending.clear()
    with pytest.raises(InvariantViolation, match="I5"):
        rig.scheduler.check()


# Why a request waits --------------------------------------------------------------------------


def reasons(rig: Rig) -> dict[str, float]:
    """Of the last step, those that somebody waits for."""
    stats = rig.stats()
    named = {reason: stats[f"num_queue_{reason.name.lower()}_reqs"] for reason in Blocked}
    assert sum(named.values()) == stats["num_queue_reqs"]
    return {reason.name: count for reason, count in named.items() if count}


def test_the_stats_say_why_requests_wait() -> None:
    rig = Rig(rows=2, pages=64)
    for i in range(5):
        rig.submit(str(i), prompt(10), max_new_tokens=100, ignore_eos=True)
    rig.step()
    assert reasons(rig) == {"NO_ROW": 3}
    rig.abort("")
    rig.run()
    rig.submit("long", prompt(60), max_new_tokens=1)  # two chunks of 32 fill the budget
    rig.submit("next", prompt(10), max_new_tokens=1)
    rig.step()
    assert reasons(rig) == {"NO_BUDGET": 1}
    rig.run()
    ids = prompt(32)
    rig.submit("leader", ids, max_new_tokens=1)
    rig.submit("follower", ids, max_new_tokens=1)
    rig.submit("stranger", prompt(10), max_new_tokens=1)
    rig.scheduler.token_budget = 42
    rig.step()
    assert reasons(rig) == {"SAME_PREFIX": 1}
    rig.run()
    rig.verify_all()


def test_who_waits_for_pages_holds_back_who_comes_after_it() -> None:
    rig = Rig(rows=8, pages=16)
    rig.submit("runs", prompt(30), max_new_tokens=20, ignore_eos=True)
    rig.step()
    rig.submit("large", prompt(40), max_new_tokens=20)
    rig.submit("small", prompt(3), max_new_tokens=1)
    rig.submit("smaller", prompt(2), max_new_tokens=1)
    rig.step()
    assert reasons(rig) == {"NO_PAGES": 1, "BEHIND": 2}
    rig.run()
    rig.verify_all()
