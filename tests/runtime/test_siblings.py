"""API processes that ask each other: names are unique in the whole server and aborted in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from radix_runtime.errors import RequestError
from radix_runtime.messages import Abort, Message, SiblingCall, SiblingReply, pack_body
from radix_runtime.server import siblings as siblings_module
from radix_runtime.server.auth import Caller
from radix_runtime.server.labels import Label, Labels
from radix_runtime.server.names import Names
from radix_runtime.server.siblings import Siblings

FULL = RequestError(status=503, code="engine_overloaded", message="full")
JOB = Label("key", "job")


class Net:
    """The links between processes of a test. Whoever is in `silent` gets nothing before `wake`;
    messages to those in `full` are refused."""

    def __init__(self) -> None:
        self.members: list[Siblings] = []
        self.silent: set[int] = set()
        self.held: list[tuple[Message, int]] = []
        self.full: set[int] = set()

    def send(self, message: Message, instance: int = 0) -> None:
        if instance in self.full:
            raise FULL
        if instance in self.silent:
            self.held.append((message, instance))
            return
        assert isinstance(message, SiblingCall | SiblingReply)
        asyncio.get_running_loop().call_soon(self.members[instance].handle, message)

    def wake(self) -> None:
        """Everybody gets what was held back, and all that follows."""
        self.silent = set()
        for message, instance in self.held:
            self.send(message, instance)


class Engine:
    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message, instance: int = 0) -> None:
        self.sent.append(message)


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    for number in range(3):
        net.members.append(Siblings(number, 3, link=net))
    yield net


def test_a_sibling_that_stands_still_is_left_out(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings_module, "_TIMEOUT", 0.3)
    for member in net.members:
        member.register("double", int, lambda value, member=member: 2 * value + member.number)

    async def work() -> None:
        assert await net.members[0].ask("double", 10, int) == {1: 21, 2: 22}
        net.silent = {2}
        assert await net.members[0].ask("double", 10, int) == {1: 21}
        alone = Siblings(0, 1, link=net)
        assert await alone.ask("double", 10, int) == {}

    asyncio.run(work())


def test_an_answer_that_cannot_be_sent_is_the_askers_loss(net: Net) -> None:
    net.members[0].register("double", int, lambda value: 2 * value)
    net.full = {2}
    net.members[0].handle(SiblingCall(id=1, op="double", body=pack_body(1), api=2))


def test_a_death_ends_questions_at_once(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings_module, "_TIMEOUT", 1000.0)
    net.silent = {1, 2}

    async def work() -> None:
        question = asyncio.ensure_future(net.members[0].ask("double", 10, int))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        net.members[0].fail_all(FULL)
        assert await asyncio.wait_for(question, 20) == {}

    asyncio.run(work())


async def turns() -> None:
    """Lets messages arrive and be answered."""
    for _ in range(20):
        await asyncio.sleep(0)


async def take(names: Names, rid: str) -> bool:
    """Whether a call gets the name JOB; its request is open then."""
    try:
        async with names.claimed([JOB]):
            names.labels.add(rid, JOB, "job")
    except RequestError as error:
        assert error.status == 400 and error.param == "rid"
        return False
    return True


@pytest.mark.parametrize("first", [0, 2])
def test_two_processes_take_a_name_at_once(net: Net, first: int) -> None:
    """One has it, whoever asks first."""
    names = [Names(member, Engine()) for member in net.members]

    async def work() -> None:
        order = [first, 2 - first]
        taken = await asyncio.gather(*(take(names[number], f"r{number}") for number in order))
        assert dict(zip(order, taken, strict=True)) == {0: True, 2: False}
        assert not await take(names[1], "r1"), "it is open in process 0"
        names[0].labels.remove("r0", JOB, "job")
        assert await take(names[1], "r1")
        assert not await take(names[0], "r0"), "it is open, though that one is first"

    asyncio.run(work())


def test_a_name_that_was_given_away_is_lost(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1 asks for a name, and waits for process 2. Process 0, which has not had the name
    when it was asked, takes it meanwhile."""
    monkeypatch.setattr(siblings_module, "_TIMEOUT", 1000.0)
    names = [Names(member, Engine()) for member in net.members]
    net.silent = {2}

    async def work() -> None:
        second = asyncio.ensure_future(take(names[1], "r1"))
        await turns()  # process 0 has answered
        first = asyncio.ensure_future(take(names[0], "r0"))
        await turns()  # process 1 has answered
        assert not second.done() and not first.done()
        net.wake()
        assert await asyncio.gather(first, second) == [True, False]
        assert not names[1].labels.has_yielded([JOB]), "nothing is kept of it"

    asyncio.run(work())


def test_two_calls_of_a_process_claim_a_name_at_once(net: Net) -> None:
    names = [Names(member, Engine()) for member in net.members]

    async def work() -> None:
        taken = await asyncio.gather(take(names[1], "a"), take(names[1], "b"))
        assert taken == [True, False]

    asyncio.run(work())


def test_claims_end_whatever_happens() -> None:
    labels = Labels()
    with pytest.raises(ZeroDivisionError), labels.claimed([JOB]):
        assert labels.are_in_use([JOB], is_first=True)
        assert not labels.are_in_use([JOB], is_first=False)
        assert labels.has_yielded([JOB])
        raise ZeroDivisionError
    assert not labels.are_in_use([JOB], is_first=True)
    assert not labels.has_yielded([JOB])


def test_an_abort_reaches_every_process(net: Net) -> None:
    engines = [Engine() for _ in net.members]
    pairs = zip(net.members, engines, strict=True)
    names = [Names(member, engine) for member, engine in pairs]
    names[1].labels.add("r1", Label("", "job"), "job")
    names[2].labels.add("r2", Label("other", "job"), "job")

    async def work() -> None:
        assert await names[0].abort("job", Caller()) == 1
        assert await names[0].abort("job", Caller(is_operator=True)) == 2
        since = 0.0
        assert names[2].labels.was_aborted(Label("", "job"), "job", since), "not submitted yet"
        assert await names[0].abort_all() == 2
        assert all(each.labels.was_aborted(Label("", "x"), "x", since) for each in names)

    asyncio.run(work())
    assert [len(engine.sent) for engine in engines] == [1, 3, 2]
    assert [engine.sent[-1] for engine in engines] == [Abort("")] * 3, "each behind its requests"


def test_abort_all_does_not_wait_for_a_sibling(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings_module, "_TIMEOUT", 1000.0)
    engine = Engine()
    names = Names(net.members[0], engine)
    net.silent = {1, 2}

    async def work() -> None:
        aborting = asyncio.ensure_future(names.abort_all())
        await asyncio.sleep(0)
        assert engine.sent == [Abort("")]
        await asyncio.sleep(0)
        net.members[0].fail_all(FULL)
        assert await asyncio.wait_for(aborting, 20) == 0

    asyncio.run(work())
