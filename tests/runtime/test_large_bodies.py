"""Large bodies over real connections: refused early, read in turns, dropped in the end."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvloop

from radix_runtime.server import incoming_body, pace
from radix_runtime.server.connection import Connection
from radix_runtime.server.pace import FREE_BYTES, PacedFlow, Turns
from tests.runtime.api_stack import MODEL, Stack
from tests.runtime.bad_requests import CHAT, COMPLETIONS, good_request

EIGHT_MB = 8_000_000
ARRAYS = b'{"prompt":[' + b"[5]," * (EIGHT_MB // 4) + b"[5]]}"
GOOD = json.dumps(good_request(MODEL)).encode()
GOOD_AND_LARGE = GOOD + b" " * EIGHT_MB
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module", params=[asyncio.new_event_loop, uvloop.new_event_loop])
def shared(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """On both event loops, whose transports are not the same: servers run on uvloop."""
    with Stack(make_loop=request.param, pages=256) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    yield shared
    shared.wait(lambda: not shared.connections())
    shared.check_idle()
    assert shared.manager.admission.choices == 0


def connect(stack: Stack) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stack.port), timeout=20)


def head(path: str, length: int | None, *more: bytes) -> bytes:
    """The request line and headers; without a length the body comes in chunks."""
    kind = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: localhost", kind, *more]
    return b"\r\n".join([*lines, b"content-type: application/json", b"", b""])


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


class Answers:
    """Answers with a length, one after the other, as they are read from a connection."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._data = b""

    def next(self) -> tuple[int, bytes, Any]:
        """Status, lower-case headers, body."""
        while b"\r\n\r\n" not in self._data:
            self._read()
        lines, _, self._data = self._data.partition(b"\r\n\r\n")
        lines = lines.lower()
        length = int(lines.partition(b"content-length: ")[2].split()[0])
        while len(self._data) < length:
            self._read()
        body = self._data[:length]
        self._data = self._data[length:]
        return int(lines.split()[1]), lines, json.loads(body or b"null")

    def has_ended(self) -> bool:
        """Whether nothing but the end follows: no answer, and no reset."""
        return not self._data and self._client.recv(1 << 16) == b""

    def _read(self) -> None:
        more = self._client.recv(1 << 16)
        assert more, f"the connection ended after {self._data[:200]!r}"
        self._data += more


# Refused early ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_shape_is_refused_when_the_beginning_has_come(stack: Stack, is_chunked: bool) -> None:
    """The rest is never sent."""
    beginning = ARRAYS[:400_000]
    with connect(stack) as client:
        if is_chunked:
            client.sendall(head(COMPLETIONS, None) + chunked(beginning, 5000)[:-5])
        else:
            client.sendall(head(COMPLETIONS, len(ARRAYS)) + beginning)
        status, lines, answer = Answers(client).next()
        assert (status, answer["error"]["code"]) == (400, "invalid_json")
        assert (b"\r\nconnection: close" in lines) == (not is_chunked)


def test_a_size_is_refused_before_a_byte_of_it(stack: Stack) -> None:
    with connect(stack) as client:
        client.sendall(head(COMPLETIONS, 9_000_000))
        status, lines, answer = Answers(client).next()
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert b"\r\nconnection: close" in lines


def test_what_is_announced_is_asked_for_only_if_it_is_wanted(stack: Stack) -> None:
    expect = b"expect: 100-continue"
    with connect(stack) as client:
        client.sendall(head(CHAT, 9_000_000, expect))
        assert Answers(client).next()[0] == 413
    with connect(stack) as client:
        client.sendall(head(CHAT, len(GOOD_AND_LARGE), expect))
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(GOOD_AND_LARGE)
        assert Answers(client).next()[0] == 200


# The answer arrives, whatever the client does ---------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/nothing"])
@pytest.mark.parametrize("close", [True, False])
def test_who_writes_all_before_reading_gets_the_answer(
    stack: Stack, path: str, close: bool
) -> None:
    more = [b"connection: close"] if close else []
    with connect(stack) as client:
        client.sendall(head(path, len(ARRAYS), *more) + ARRAYS)
        answers = Answers(client)
        assert answers.next()[0] == (400 if path == COMPLETIONS else 404)
        assert answers.has_ended()


def test_who_reads_while_writing_gets_the_answer_at_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And may write to the end; the answer comes while most of the body is on its way."""
    monkeypatch.setattr(pace, "_PAUSE", 0.02)
    with connect(stack) as client:
        data = head(COMPLETIONS, len(ARRAYS)) + ARRAYS
        writer = threading.Thread(target=client.sendall, args=(data,))
        writer.start()
        answers = Answers(client)
        assert answers.next()[0] == 400
        assert writer.is_alive()
        writer.join(20)
        assert answers.has_ended()


@pytest.mark.parametrize("body", [ARRAYS, GOOD_AND_LARGE], ids=["refused", "served"])
def test_usual_clients(stack: Stack, body: bytes) -> None:
    expected = 400 if body is ARRAYS else 200
    with httpx.Client(base_url=stack.url, timeout=20) as client:
        for data in (body, GOOD, body, GOOD):
            response = client.post(CHAT, content=data, headers={"content-type": "application/json"})
            assert response.status_code == (200 if data is GOOD else expected)
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    quiet = ["-s", "-S", "-o", "/dev/null", "-w", "%{http_code}"]
    sends = ["-H", "Content-Type: application/json", "--data-binary", "@-"]
    done = subprocess.run([curl, *quiet, *sends, stack.url + CHAT], input=body, capture_output=True)
    assert (done.stdout, done.stderr) == (b"%d" % expected, b"")


# The connection afterwards ----------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 60_000, 100])
def test_a_connection_goes_on_after_a_large_body(stack: Stack, size: int | None) -> None:
    """The next request may follow at once."""
    with connect(stack) as client:
        body = GOOD_AND_LARGE[:1_000_000]
        if size is None:
            data = head(CHAT, len(body)) + body
        else:
            data = head(CHAT, None) + chunked(body, size)
        sender = threading.Thread(target=client.sendall, args=(2 * data + GET,))
        sender.start()
        answers = Answers(client)
        texts = []
        for _ in range(2):
            status, lines, answer = answers.next()
            assert status == 200 and b"\r\nconnection: close" not in lines
            texts.append(answer["choices"][0]["message"]["content"])
        assert texts[0] == texts[1]
        assert answers.next()[0] == 200
        sender.join(20)


def test_a_connection_goes_on_after_a_small_body_that_is_refused(stack: Stack) -> None:
    """Though the head may be refused before it has come."""
    with connect(stack) as client:
        answers = Answers(client)
        for _ in range(2):
            client.sendall(head("/v1/nothing", len(GOOD)))
            assert answers.next()[0] == 404
            client.sendall(GOOD + GET)
            assert answers.next()[0] == 200


@pytest.mark.parametrize("more", [[], [b"expect: 100-continue"]])
def test_a_body_that_does_not_come_ends_the_connection(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, more: list[bytes]
) -> None:
    """What comes later would be taken for it."""
    monkeypatch.setattr(incoming_body, "_LINGER_IDLE", 0.1)
    monkeypatch.setattr(stack._server.config, "timeout_keep_alive", 600)
    with connect(stack) as client:
        client.sendall(head("/v1/nothing", 100, *more))
        answers = Answers(client)
        status, lines, _ = answers.next()
        assert status == 404 and (b"\r\nconnection: close" in lines) == bool(more)
        assert answers.has_ended()


def test_of_a_refused_body_so_much_is_read(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_body, "_LINGER_BYTES", 1_000_000)
    with connect(stack) as client:
        client.sendall(head(COMPLETIONS, 1 << 40))
        sent = 0
        with pytest.raises(OSError):
            while sent < 1 << 30:
                sent += client.send(bytes(1 << 20))
        assert sent < 1 << 26  # the most that the buffers of both sides hold, and more


def test_who_goes_away_while_waiting_for_a_turn_is_forgotten(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "_PAUSE", 0.05)
    for body in (ARRAYS, GOOD_AND_LARGE):
        with connect(stack) as client:
            client.sendall(head(CHAT, len(body)) + body[: EIGHT_MB // 8])
            stack.wait(lambda: bool(stack.connections()))
    stack.wait(lambda: not stack.connections())


# Turns ------------------------------------------------------------------------------------


def test_small_bodies_wait_for_no_turn_and_large_ones_do(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[PacedFlow] = []
    wait = Turns.wait

    def note(turns: Turns, flow: PacedFlow) -> None:
        waited.append(flow)
        wait(turns, flow)

    monkeypatch.setattr(Turns, "wait", note)
    with connect(stack) as client:
        answers = Answers(client)
        for size in (0, FREE_BYTES // 2):
            body = GOOD + b" " * size
            client.sendall(head(CHAT, len(body)))
            time.sleep(0.05)
            client.sendall(body)
            assert answers.next()[0] == 200
        assert not waited
        client.sendall(head(CHAT, len(GOOD_AND_LARGE)) + GOOD_AND_LARGE)
        assert answers.next()[0] == 200
        assert len(waited) > EIGHT_MB // (300 << 10)  # event loops read at most 256 KiB at a time


@pytest.mark.parametrize("path", [CHAT, "/v1/nothing"], ids=["served", "dropped"])
def test_there_is_a_pause_between_two_reads_of_large_bodies(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Of one connection as of four."""
    monkeypatch.setattr(pace, "_PAUSE", 0.01)
    reads: list[float] = []
    received = Connection.data_received

    def note(self: Connection, data: bytes) -> None:
        reads.append(time.monotonic())
        received(self, data)

    monkeypatch.setattr(Connection, "data_received", note)
    body = GOOD_AND_LARGE[:2_000_000]
    for count in (1, 4):
        reads.clear()
        clients = [connect(stack) for _ in range(count)]
        senders = [
            threading.Thread(target=client.sendall, args=(head(path, len(body)) + body,))
            for client in clients
        ]
        for sender in senders:
            sender.start()
        for client in clients:
            assert Answers(client).next()[0] in (200, 404)
        for sender in senders:
            sender.join(20)
        for client in clients:
            client.close()
        stack.wait(lambda: not stack.connections())
        # What comes with the head is read at once; a timer may be a millisecond early.
        assert len(reads) >= count * (1 + len(body) // (256 << 10))
        assert reads[-1] - reads[0] >= 0.009 * (len(reads) - 2 * count)


class _Transport:
    """What a flow needs of a transport; `read` notes who reads on."""

    def __init__(self, name: str, read: Callable[[str], None]) -> None:
        self.name = name
        self.is_ended = False
        self._read = read

    def is_closing(self) -> bool:
        return self.is_ended

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        self._read(self.name)


def test_turns_are_taken_one_after_the_other() -> None:
    async def run() -> None:
        turns = Turns()
        reads: list[str] = []
        transports = [_Transport(name, reads.append) for name in "abc"]
        flows = [PacedFlow(transport, turns) for transport in transports]  # type: ignore[arg-type]
        flows[0].pause_reading()
        flows[0].resume_reading()
        assert reads == ["a"]  # at once: it was not to wait for a turn
        for flow in flows:
            flow.pause_until_turn()
        await asyncio.sleep(0.01)
        for flow in flows:
            flow.resume_reading()
            flow.resume_reading()
        assert reads == ["a"]
        transports[1].is_ended = True
        while len(reads) < 3:
            before = len(reads)
            await asyncio.sleep(0)
            assert len(reads) - before <= 1
        assert reads == ["a", "a", "c"]
        await asyncio.sleep(0.01)
        assert reads == ["a", "a", "c"]

    asyncio.run(run())
