"""What API processes share: each bound and each figure is that of the whole server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from radix_runtime.config import ServerArgs
from radix_runtime.errors import RequestError
from radix_runtime.server import siblings as siblings_module
from radix_runtime.server.admission import Admission
from radix_runtime.server.drain import Drain
from radix_runtime.server.metrics import Metrics
from radix_runtime.server.shared_numbers import (
    BYTES,
    CHOICES,
    CONNECTIONS,
    SharedNumbers,
    create_memory,
)
from tests.runtime.manager_rig import build_one_of

KEYS = ["key-a", "key-b"]


def shared(processes: int, keys: Sequence[str] = ()) -> list[SharedNumbers]:
    """The numbers as each process sees them."""
    memory = create_memory(processes, keys)
    try:
        return [
            SharedNumbers(processes, process, keys=keys, descriptor=memory)
            for process in range(processes)
        ]
    finally:
        os.close(memory)


@pytest.fixture
def three() -> list[SharedNumbers]:
    return shared(3, KEYS)


def test_each_process_has_its_own_numbers(three: list[SharedNumbers]) -> None:
    for process, numbers in enumerate(three):
        numbers.publish(CHOICES, 10**process)
        numbers.publish(BYTES, 1 << 40)
        numbers.publish_key("key-b", 5 * 10**process)
        numbers.publish_key("of no column", 77)
    assert [numbers.elsewhere(CHOICES) for numbers in three] == [110, 101, 11]
    assert [numbers.elsewhere(BYTES) for numbers in three] == [2 << 40] * 3
    assert [numbers.elsewhere_of_key("key-b") for numbers in three] == [550, 505, 55]
    assert [numbers.elsewhere_of_key("key-a") for numbers in three] == [0] * 3
    assert three[0].elsewhere_of_key("of no column") == 0


def test_alone_there_is_nobody_else() -> None:
    alone = SharedNumbers()
    alone.publish(CONNECTIONS, 9)
    assert alone.elsewhere(CONNECTIONS) == 0 and not alone.is_ahead(CONNECTIONS)
    assert alone.everywhere(CONNECTIONS) == 9


def test_none_is_ready_before_all_are() -> None:
    managers = [build_one_of(numbers)[0] for numbers in shared(2)]
    managers[0].set_ready({})
    for manager in managers:
        with pytest.raises(RequestError, match="still loading"):
            manager.require_ready()
    managers[1].set_ready({})
    for manager in managers:
        manager.require_ready()


def test_who_is_ahead(three: list[SharedNumbers]) -> None:
    def ahead(*counts: int) -> list[bool]:
        for numbers, count in zip(three, counts, strict=True):
            numbers.publish(CONNECTIONS, count)
        return [numbers.is_ahead(CONNECTIONS) for numbers in three]

    assert ahead(0, 0, 0) == [False, False, False]
    assert ahead(1, 0, 1) == [True, False, True]
    assert ahead(80, 71, 70) == [False, False, False]  # within an eighth
    assert ahead(82, 71, 70) == [True, False, False]


def test_the_count_is_of_all_processes(three: list[SharedNumbers]) -> None:
    args = ServerArgs(max_running_requests=2, max_queued_requests=3)
    admissions = [Admission(args, numbers) for numbers in three]
    with ExitStack() as held:
        for number in range(5):
            held.enter_context(admissions[number % 3].enter(1))
        for admission in admissions:
            for refused in (admission.check, lambda admission=admission: admission.enter(1)):
                with pytest.raises(RequestError, match="^5 requests are open") as caught:
                    refused()
                assert caught.value.status == 503
    assert [admission.all_choices for admission in admissions] == [0] * 3


def test_a_place_that_is_refused_is_given_back(three: list[SharedNumbers]) -> None:
    """Of two that pass the first look at once none stays too many."""
    args = ServerArgs(max_running_requests=1, max_queued_requests=1)
    first, second, _ = (Admission(args, numbers) for numbers in three)
    with first.enter(1), second.enter(1) as place:
        with pytest.raises(RequestError):
            second._hold(place, 1, choices=2)
        assert (place.choices, second.choices, first.all_choices) == (1, 1, 2)


def test_bytes_are_of_all_processes(three: list[SharedNumbers]) -> None:
    first, second, _ = (Admission(ServerArgs(max_queue_bytes=1 << 20), each) for each in three)
    with first.enter(1 << 20):
        with pytest.raises(RequestError, match="they hold"):
            second.check()
        with pytest.raises(RequestError, match="they hold"):
            second.enter(1)
    with second.enter(1 << 21):  # one alone may be larger
        pass


def test_a_key_is_counted_in_all_processes(three: list[SharedNumbers]) -> None:
    args = ServerArgs(max_requests_per_key=2, api_key_file="x")
    first, second, third = (Admission(args, numbers) for numbers in three)
    with first.enter(1, "key-a"), second.enter(1, "key-a"):
        with pytest.raises(RequestError) as caught:
            third.check("key-a")
        assert caught.value.status == 429
        third.check("key-b")
    third.check("key-a")


def test_work_that_waits_is_of_all_processes(three: list[SharedNumbers]) -> None:
    """The speed is the engine's, whoever has the tokens."""
    first, second, idle = (Admission(ServerArgs(max_queue_seconds=10), each) for each in three)
    for admission in (first, second):
        admission.begin_work(0, 100.0)
    for second_number in range(101, 111):
        for admission in (first, second):
            admission.note_work(1000, float(second_number))
    first.begin_work(10_000, 110.0)
    second.begin_work(20_000, 110.0)
    for admission in (first, second, idle):  # the idle one has no evidence of its own
        assert admission.seconds == pytest.approx(15, rel=0.1)
        with pytest.raises(RequestError):
            admission.check()
    first.end_wait(10_000)
    second.end_wait(20_000)
    assert first.seconds == 0


def test_the_last_tokens_are_counted_with_their_time(three: list[SharedNumbers]) -> None:
    """10 tokens a second for this process and as many for another, in many short requests."""
    own, other, _ = (Admission(ServerArgs(), numbers) for numbers in three)
    other.begin_work(0, 0.0)
    for start in range(0, 100, 5):
        own.begin_work(1, float(start))
        own.end_wait(1)
        other.note_work(50, start + 5.0)
        own.pause(start + 5.0)  # as when the last request ends within a message,
        own.note_work(50, start + 5.0)  # whose work is summed up behind it
        other.note_work(1000, start + 5.0)  # while nothing is open in this process
        own.note_work(0, start + 5.0)
    assert own.speed.seconds(20) == pytest.approx(1, rel=0.05)


def test_all_processes_drain_together(three: list[SharedNumbers]) -> None:
    first, second, third = (Drain(0.0, numbers) for numbers in three)
    second.open_call()
    first.begin()
    for drain in (first, second, third):
        assert drain.is_asked and drain.refuses and drain.open_calls == 1
        with pytest.raises(RequestError):
            drain.require_admitting()
    third.undo()
    assert not first.is_asked and not first.refuses
    second.begin(for_good=True)
    for drain in (first, second, third):
        with pytest.raises(RequestError):
            drain.undo()
        assert drain.refuses
    asyncio.run(asyncio.wait_for(first.finished(), 10))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(second.finished(), 0.1))
    second.close_call()
    asyncio.run(asyncio.wait_for(second.finished(), 10))


def test_a_drain_for_good_refuses_after_its_delay_also_what_was_drained_before() -> None:
    drain = Drain(1000.0, SharedNumbers())
    drain.begin()
    drain.begin(for_good=True)
    assert drain.is_asked and not drain.refuses
    drain._numbers.drained_from = 1
    assert drain.refuses


def test_metrics_are_sums() -> None:
    first, second = (Metrics("m", Admission(ServerArgs(), SharedNumbers())) for _ in range(2))
    first.counts.accepted = 3
    first.count_call("/generate", 200)
    second.counts.accepted = 4
    second.counts.ok = 4
    second.count_call("/generate", 200)
    second.count_call("/generate", 503)
    second.prompt_length.observe(10)
    text = first.render({}, first.total([second.figures()])).decode()
    for line in (
        "radix:requests_accepted_total 7.0",
        'radix:requests_total{outcome="ok"} 4.0',
        "radix:open_requests 3.0",
        'radix:http_requests_total{route="/generate",status="200"} 2.0',
        'radix:http_requests_total{route="/generate",status="503"} 1.0',
        'radix:request_prompt_tokens_bucket{le="16.0"} 1.0',
        "radix:request_prompt_tokens_sum 10.0",
    ):
        assert line in text, text
    assert first.counts.accepted == 3


def test_there_are_no_figures_without_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums without a process that stands still would be lower than before."""
    monkeypatch.setattr(siblings_module, "_TIMEOUT", 0.05)
    manager, _ = build_one_of(shared(2)[0])

    async def work() -> None:
        with pytest.raises(RequestError, match="an API process does not answer") as caught:
            await manager.figures()
        assert (caught.value.status, caught.value.code) == (503, "unhealthy")

    asyncio.run(work())
