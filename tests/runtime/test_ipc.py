"""Links between processes: order, gaps, foreign frames, full queues, the asyncio side."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from radix_runtime.errors import RequestError
from radix_runtime.messages import (
    Abort,
    Control,
    ControlReply,
    RequestFailed,
    SiblingCall,
    TextBatch,
    TextDelta,
    TextStop,
    TokenBatch,
    encode,
    pack_body,
)
from radix_runtime.processes import ipc
from tests.runtime.net import API, DETOKENIZER, SCHEDULER, TOKEN, Net, generate, open_net, take


@pytest.fixture
def net() -> Iterator[Net]:
    with open_net() as net:
        yield net


def text_delta(rid: str) -> TextDelta:
    return TextDelta(rid=rid, choice=0, ids=b"", text="x")


def test_messages_arrive_in_order_and_unchanged(net: Net) -> None:
    inbox = net.receiver(SCHEDULER)
    api = net.sender(API)
    detokenizer = net.sender(DETOKENIZER)
    sent = [generate(i) for i in range(500)] + [
        Abort("r1"),
        Control(7, "stats", body=pack_body([1, "é"])),
    ]
    for message in sent:
        api.send(message)
    assert take(inbox, len(sent)) == sent
    stop = TextStop(rid="é", choice=0, n_tokens=3)
    detokenizer.send(stop)
    assert take(inbox, 1) == [stop]
    assert inbox.receive() == [] and not inbox.wait(0)


def test_routes_by_type(net: Net) -> None:
    at_api = net.receiver(API)
    at_detokenizer = net.receiver(DETOKENIZER)
    net.receiver(SCHEDULER)
    scheduler = net.sender(SCHEDULER)
    detokenizer = net.sender(DETOKENIZER)
    failed = RequestFailed(rid="r", status=500, code="internal_error", message="x")
    scheduler.send(TokenBatch([]))
    scheduler.send(failed)
    scheduler.send(ControlReply(1, body=pack_body(True)))
    assert take(at_detokenizer, 2) == [TokenBatch([]), failed]
    assert take(at_api, 1) == [ControlReply(1, body=pack_body(True))]
    detokenizer.send(TextBatch([text_delta("r")]))
    detokenizer.send(failed)
    assert take(at_api, 2)[1] == failed
    with pytest.raises(KeyError):
        scheduler.send(generate(0))


def test_foreign_frames_are_ignored_and_counted(net: Net) -> None:
    inbox = net.receiver(SCHEDULER)
    stranger = net.raw(SCHEDULER)
    net.sender(API, secrets.token_bytes(ipc.TOKEN_BYTES)).send(generate(0))
    stranger.send(b"")
    stranger.send(b"\xdd\xff\xff\xff\xff" * 20)
    api = net.sender(API)
    api.wait_connected(30)
    api.send(generate(1))
    deadline = time.monotonic() + 30
    got: list[object] = []
    while inbox.ignored_frames < 3 or not got:
        assert time.monotonic() < deadline
        inbox.wait(0.2)
        got += inbox.receive()
    assert got == [generate(1)]
    stranger.close()


@pytest.mark.parametrize(
    ("sequence", "body"),
    [(1, encode(Abort("r"))), (0, b"\xc1"), (0, encode(Abort("r"))[:-1]), (0, b"")],
)
def test_a_gap_or_a_broken_body_is_fatal(net: Net, sequence: int, body: bytes) -> None:
    inbox = net.receiver(SCHEDULER)
    socket = net.raw(SCHEDULER)
    socket.send(net.frame(API, sequence, body))
    assert inbox.wait(30)
    with pytest.raises(ipc.LinkError):
        inbox.receive()
    socket.close()


def test_a_replayed_message_is_fatal(net: Net) -> None:
    inbox = net.receiver(SCHEDULER)
    socket = net.raw(SCHEDULER)
    frame = net.frame(API, 0, encode(Abort("r")))
    socket.send(frame)
    assert take(inbox, 1) == [Abort("r")]
    socket.send(frame)
    assert inbox.wait(30)
    with pytest.raises(ipc.LinkError):
        inbox.receive()
    socket.close()


def test_too_large_a_message_is_refused_before_it_is_sent(net: Net) -> None:
    inbox = net.receiver(SCHEDULER)
    api = net.sender(API)
    with pytest.raises(ipc.LinkError, match="limit"):
        api.send(generate(0, ipc.MAX_BODY // 4))
    largest = generate(0, ipc.MAX_BODY // 4 - 200)
    api.send(largest)
    assert take(inbox, 1) == [largest]


def test_an_absent_or_stuck_receiver_is_noticed(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_HIGH_WATER", 10)
    api = net.sender(API)
    assert not api.try_send(Abort("r"))
    with pytest.raises(ipc.LinkError):
        api.wait_connected(0.05)
    inbox = net.receiver(SCHEDULER)
    api.wait_connected(30)
    sent = 0
    deadline = time.monotonic() + 30
    while api.try_send(generate(sent, 10_000)):
        sent += 1
        assert time.monotonic() < deadline, "the queue has no bound"
    assert take(inbox, sent)[-1] == generate(sent - 1, 10_000)
    api.send(Abort("later"))
    assert take(inbox, 1) == [Abort("later")]


def test_a_socket_that_nobody_else_keeps_ends_a_wait(net: Net) -> None:
    """As the one that a signal makes readable."""
    ours, theirs = socket.socketpair()
    receiver = ipc.Receiver(net.node(SCHEDULER), wake=ours)
    net.open.append(receiver)
    del ours
    threading.Timer(0.2, lambda: theirs.send(b"x")).start()
    start = time.monotonic()
    assert not receiver.wait(10.0)
    assert 0.1 < time.monotonic() - start < 5
    theirs.close()


def test_wait_wakes_at_once(net: Net) -> None:
    inbox = net.receiver(SCHEDULER)
    api = net.sender(API)
    api.wait_connected(30)
    threading.Timer(0.1, lambda: api.send(Abort("r"))).start()
    start = time.monotonic()
    assert inbox.wait(30)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<32sHIIQ", TOKEN, 99, 0, 0, 0) + encode(Abort("r")),  # nobody's
        struct.pack("<32sHIIQ", TOKEN, 2, 1, 0, 1) + encode(Abort("r")),  # a gap after a restart
    ],
    ids=["of nobody", "after a gap"],  # the token is another in every process
)
def test_a_sender_that_cannot_be_is_fatal(net: Net, frame: bytes) -> None:
    inbox = net.receiver(SCHEDULER)
    socket = net.raw(SCHEDULER)
    socket.send(frame)
    assert inbox.wait(30)
    with pytest.raises(ipc.LinkError):
        inbox.receive()
    socket.close()


async def cpu_of_a_wait(link: ipc.AsyncLink) -> float:
    """Seconds of this process's CPU in half a second in which nothing comes. A collection of
    garbage, or what another test has left behind, may fall into it."""
    before = time.process_time()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(link.receive(), 0.5)
    return time.process_time() - before


@pytest.mark.serial
def test_async_link(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    at_scheduler = net.receiver(SCHEDULER)
    at_api = net.receiver(API)
    link = ipc.AsyncLink(at_api, net.sender(API))
    detokenizer = net.sender(DETOKENIZER)
    count = 2000

    def flood() -> None:
        for i in range(count):
            detokenizer.send(TextBatch([text_delta(str(i))]))
            if i % 500 == 0:
                time.sleep(0.02)

    async def main() -> None:
        thread = threading.Thread(target=flood)
        thread.start()
        got: list[str] = []
        while len(got) < count:
            for message in await asyncio.wait_for(link.receive(), 60):
                assert isinstance(message, TextBatch)
                got += [d.rid for d in message.deltas]
        assert got == [str(i) for i in range(count)]
        thread.join()
        waits = [await cpu_of_a_wait(link) for _ in range(3)]
        assert min(waits) < 0.1, "waiting spins"
        link.send(generate(0))
        assert await asyncio.to_thread(take, at_scheduler, 1) == [generate(0)]

    asyncio.run(main())


def test_async_link_keeps_aborts_when_full(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_HIGH_WATER", 5)
    at_api = net.receiver(API)
    link = ipc.AsyncLink(at_api, net.sender(API))

    async def main() -> None:
        with pytest.raises(RequestError) as refused:  # nobody listens yet
            link.send(generate(0))
        assert (refused.value.status, refused.value.code) == (503, "engine_overloaded")
        for i in range(20):
            link.send(Abort(f"r{i}"))
        inbox = net.receiver(SCHEDULER)
        got: list[object] = []
        while len(got) < 20:
            await asyncio.sleep(0.02)
            got += inbox.receive()
        assert got == [Abort(f"r{i}") for i in range(20)]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_abort_that_waits_holds_up_no_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_net(api_processes=2) as net:
        link = ipc.AsyncLink(net.receiver(API), net.sender(API))
        sibling = net.receiver("api/1")
        call = SiblingCall(id=1, op="abort", body=pack_body(None), api=0)

        async def main() -> None:
            link.send(Abort("r1"))  # the scheduler is not there
            with pytest.raises(RequestError):
                link.send(generate(2))
            end = time.monotonic() + 20
            while True:
                with contextlib.suppress(RequestError):  # until the link is connected
                    link.send(call, 1)
                    break
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(take, sibling, 1) == [call]

        asyncio.run(asyncio.wait_for(main(), 60))
