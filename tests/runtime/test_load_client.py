"""The load generator of `radix bench serve`: what it reads from bytes in any pieces, and its
processes against a server that only streams."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from bench.clients.__main__ import StreamServer, measure, radix_records
from bench.clients.others import httpx_records
from radix_runtime.cli.bench_serve import _arrivals
from radix_runtime.cli.figures import Record
from radix_runtime.cli.http_stream import EventReader, HttpAnswer
from radix_runtime.cli.load_backends import OpenAI, SGLang, StreamReader
from radix_runtime.cli.load_client import Job, Report, split
from radix_runtime.cli.load_processes import run_load
from radix_runtime.cli.raw_client import RawClient, target_of
from radix_runtime.cli.workload import Item
from radix_runtime.errors import RequestError

DONE = b"data: [DONE]\n\n"
BODY = "".join(f'data: {{"n":{n},"text":"ü"}}\n\n' for n in range(3)).encode()


def chunked(body: bytes, sizes: list[int]) -> bytes:
    parts = []
    while body:
        size = sizes[len(parts) % len(sizes)]
        parts.append(f"{len(body[:size]):X};x=y\r\n".encode() + body[:size] + b"\r\n")
        body = body[size:]
    return b"".join(parts) + b"0\r\nTrailer: t\r\n\r\n"


ANSWERS = {
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(BODY, [7, 40]),
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nX: y\r\n\r\n" % len(BODY) + BODY,
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    % len(BODY)
    + BODY,
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_in_two_pieces_cut_anywhere(kind: str) -> None:
    data = ANSWERS[kind]
    for cut in range(len(data) + 1):
        answer = HttpAnswer()
        body = answer.feed(data[:cut]) + answer.feed(data[cut:])
        assert (body, answer.status) == (BODY, 200), cut
        assert answer.is_complete and answer.keeps_alive
        answer.end()


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_byte_by_byte_and_in_random_pieces(kind: str) -> None:
    rng = random.Random(3)
    for pieces in ([1] * 2000, [rng.randint(1, 30) for _ in range(2000)]):
        answer = HttpAnswer()
        events = EventReader()
        found = []
        data = ANSWERS[kind]
        for size in pieces:
            assert answer.is_complete == (not data)
            if not data:
                break
            found += events.feed(answer.feed(data[:size]))
            data = data[size:]
        assert [json.loads(event)["n"] for event in found] == [0, 1, 2]


def test_answers_that_end_with_their_connection() -> None:
    answer = HttpAnswer()
    assert answer.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert not answer.is_complete and not answer.keeps_alive
    answer.end()
    assert answer.is_complete
    closing = HttpAnswer()
    closing.feed(b"HTTP/1.1 503 No\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    assert closing.is_complete and closing.status == 503 and not closing.keeps_alive
    for broken in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"):
        answer = HttpAnswer()
        answer.feed(broken)
        with pytest.raises(ValueError, match="in the middle"):
            answer.end()
    for nonsense in (b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 two\r\n\r\n", b"x" * (1 << 17)):
        with pytest.raises(ValueError):
            HttpAnswer().feed(nonsense)
    with pytest.raises(ValueError):  # a size that is none
        HttpAnswer().feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")


def test_events_of_other_servers() -> None:
    text = b": ping\r\n\r\nevent: x\r\ndata: a\r\n\r\ndata:b\n\ndata: c\ndata: d\n\ndata: half"
    for cut in range(len(text)):
        events = EventReader()
        assert events.feed(text[:cut]) + events.feed(text[cut:]) == [b"a", b"b", b"c\nd"], cut


def read(backend: type[OpenAI] | type[SGLang], *events: object) -> Record:
    record = Record(prompt_tokens=4, start=0.0)
    reader = StreamReader(backend("m", temperature=0.0, cache_salt=""), record)
    encoded = [e if isinstance(e, bytes) else json.dumps(e).encode() for e in events]
    for now, event in enumerate(encoded):
        reader.take([event], float(now))
    reader.finish()
    return record


def test_what_a_stream_says() -> None:
    piece = {"choices": [{"text": "a"}], "usage": None}
    usage = {"completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}
    good = read(OpenAI, piece, piece, {"choices": [], "usage": usage}, b"[DONE]")
    assert (good.chunks, good.output_tokens, good.cached_tokens) == ([0.0, 1.0], 7, 2)
    assert good.error is None
    meta = {"completion_tokens": 3, "cached_tokens": 1}
    other = read(SGLang, {"text": ""}, {"text": "", "meta_info": meta}, b"[DONE]")
    assert (len(other.chunks), other.output_tokens, other.cached_tokens) == (2, 3, 1)
    assert read(OpenAI, piece).error == "stream_broken: the stream ended without [DONE]"
    failed = read(OpenAI, piece, {"error": {"code": "engine_dead", "message": "gone"}}, b"[DONE]")
    assert failed.error == "engine_dead: gone"
    assert "no JSON" in str(read(OpenAI, b"{half", b"[DONE]").error)


def job_of(url: str, count: int, concurrency: int = 0, tokens: int = 5) -> Job:
    return Job(
        target=target_of(url, api_key="secret"),
        backend=OpenAI("m", temperature=0.0, cache_salt="s"),
        items=[Item([1] * (n + 1), tokens) for n in range(count)],
        due=[0.0] * count,
        concurrency=concurrency,
    )


@pytest.mark.parametrize(("count", "concurrency", "parts"), [(7, 0, 3), (7, 5, 3), (2, 9, 4)])
def test_a_job_is_split_without_a_rest(count: int, concurrency: int, parts: int) -> None:
    jobs = split(job_of("http://h", count, concurrency), parts)
    assert len(jobs) == min(parts, count, concurrency or count)
    together = sorted(len(item.prompt) for part in jobs for item in part.items)
    assert together == list(range(1, count + 1))
    assert all(part.items for part in jobs)
    if concurrency:
        assert sum(part.concurrency for part in jobs) == concurrency
        assert min(part.concurrency for part in jobs) >= 1
    else:
        assert {part.concurrency for part in jobs} == {0}


@pytest.mark.parametrize("processes", [1, 3])
def test_every_event_of_every_stream_is_seen(processes: int) -> None:
    with StreamServer(tick_ms=2.0) as url:
        found = measure(radix_records(processes), url, streams=20, tokens=30)
        beside = measure(httpx_records, url, streams=20, tokens=30)
    for figures in (found, beside):
        assert figures["completed"] == 20 and figures["failed"] == 0
        assert figures["total_output_tokens"] == figures["server_events"] == 600
        assert figures["max_concurrent_requests"] == 20
    # A tick lies between two events of a stream; on a busy machine the first one may be late, which
    # shortens the rest. Times taken when a stream has ended would be all alike.
    assert found["mean_itl_ms"] > 1.5


def test_records_come_in_the_order_of_the_items() -> None:
    with StreamServer(tick_ms=1.0) as url:
        seen: list[int] = []
        report = run_load(job_of(url, 7, concurrency=3), processes=2, on_done=seen.append)
    assert [record.prompt_tokens for record in report.records] == list(range(1, 8))
    assert all(len(record.chunks) == 5 and record.error is None for record in report.records)
    assert seen[-1] == 7 and seen == sorted(seen) and 0 < report.cpu_share < 2
    # Never more than three at once, and the slots are used.
    edges = [(record.start, 1) for record in report.records]
    edges += [(record.end, -1) for record in report.records]
    open_now = list(itertools.accumulate(step for _, step in sorted(edges)))
    assert max(open_now) <= 3


@contextmanager
def http_server(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer(self)

        def do_GET(self) -> None:
            self.body = None
            answer(self)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def one(url: str, count: int = 1) -> Report:
    return run_load(job_of(url, count, concurrency=1), processes=1, on_done=lambda done: None)


def test_connections_serve_again_and_bodies_are_whole() -> None:
    seen: list[tuple[Any, ...]] = []

    def answer(call: http.server.BaseHTTPRequestHandler) -> None:
        body = call.body  # type: ignore[attr-defined]
        seen.append((call.client_address, call.path, body["max_tokens"], len(body["prompt"])))
        assert call.headers["authorization"] == "Bearer secret"
        text = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[]}\n\ndata: [DONE]\n\n'
        call.send_response(200)
        call.send_header("Content-Length", str(len(text)))
        call.end_headers()
        call.wfile.write(text)

    with http_server(answer) as url:
        report = one(url, count=3)
    assert [record.error for record in report.records] == [None] * 3
    # A server that tells no usage is taken at its word.
    assert [record.output_tokens for record in report.records] == [5] * 3
    assert len({address for address, *_ in seen}) == 1
    assert [rest for _, *rest in seen] == [["/v1/completions", 5, n] for n in (1, 2, 3)]


def test_what_goes_wrong_is_in_the_record() -> None:
    answers = iter([(503, b'{"error": {"code": "busy", "message": "later"}}'), (502, b"<html>")])

    def answer(call: http.server.BaseHTTPRequestHandler) -> None:
        status, text = next(answers, (0, b""))
        if status:
            call.send_response(status)
            call.send_header("Content-Length", str(len(text)))
            call.end_headers()
            call.wfile.write(text)
        else:
            call.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ndat")
            call.close_connection = True

    with http_server(answer) as url:
        first, second, third = one(url, count=3).records
    assert first.error == "busy: later"
    assert second.error == "unknown: the server answered with status 502"
    assert third.error is not None and third.error.startswith("unreachable: ")
    nobody = one("http://127.0.0.1:1").records[0]  # a port that nobody listens on
    assert nobody.error is not None and nobody.error.startswith("unreachable: ")


def test_a_connection_that_was_closed_while_idle_is_not_used_again() -> None:
    def answer(call: http.server.BaseHTTPRequestHandler) -> None:
        call.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DONE) + DONE)
        call.close_connection = True  # without saying so

    with http_server(answer) as url:
        job = replace(job_of(url, 2, concurrency=1), due=[0.0, 0.5])
        report = run_load(job, processes=1, on_done=lambda done: None)
    assert [record.error for record in report.records] == [None, None]


def run_calls(url: str, *calls: tuple[str, str, Any]) -> list[tuple[int, bytes]]:
    """The answers of one client to calls one after the other."""

    async def work() -> list[tuple[int, bytes]]:
        client = RawClient(target_of(url, api_key="secret"))
        found = [await client.call(method, path, body, seconds=10) for method, path, body in calls]
        client.close()
        return found

    return asyncio.run(work())


def test_short_calls_keep_their_connection() -> None:
    seen = []

    def answer(call: http.server.BaseHTTPRequestHandler) -> None:
        body = call.body  # type: ignore[attr-defined]
        seen.append((call.client_address, call.command, call.path, body))
        assert call.headers["Authorization"] == "Bearer secret"
        call.send_response(503 if call.path == "/full" else 200)
        call.send_header("Content-Length", "2")
        call.end_headers()
        call.wfile.write(b"ok")

    calls = [("POST", "/full", {"n": 1}), ("GET", "/health", None), ("POST", "/x", {"n": 2})]
    with http_server(answer) as url:
        assert run_calls(url, *calls) == [(503, b"ok"), (200, b"ok"), (200, b"ok")]
    assert len({address for address, *_ in seen}) == 1
    assert [rest for _, *rest in seen] == [
        ["POST", "/full", {"n": 1}],
        ["GET", "/health", None],
        ["POST", "/x", {"n": 2}],
    ]


def test_a_call_on_a_connection_that_was_closed_meanwhile_goes_over_another() -> None:
    served = 0

    def answer(call: http.server.BaseHTTPRequestHandler) -> None:
        nonlocal served
        served += 1
        call.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        call.close_connection = True  # without saying so

    with http_server(answer) as url:
        assert run_calls(url, *[("GET", "/", None)] * 3) == [(200, b"ok")] * 3
    assert served == 3


def test_a_short_call_that_goes_wrong() -> None:
    def answer(call: http.server.BaseHTTPRequestHandler) -> None:
        call.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ndat")
        call.close_connection = True

    with http_server(answer) as url, pytest.raises(OSError, match="in the middle of an answer"):
        run_calls(url, ("GET", "/", None))
    with pytest.raises(OSError, match="127.0.0.1"):
        run_calls("http://127.0.0.1:1", ("GET", "/", None))


def test_targets() -> None:
    target = target_of("https://h.example/base/v1/", None)
    assert (target.host, target.port, target.is_tls, target.prefix) == (
        "h.example", 443, True, "/base",
    )  # fmt: skip
    assert target_of("http://[::1]:8000", None).host == "::1"
    for url in ("nonsense", "ftp://h", "http://", "http://h:x", "http://[::1"):
        with pytest.raises(RequestError, match="no answer from the server"):
            target_of(url, None)


def test_arrivals_are_a_poisson_process() -> None:
    times = _arrivals(4000, rate=50.0, seed=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times == _arrivals(4000, rate=50.0, seed=1) != _arrivals(4000, rate=50.0, seed=2)
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.06)
    # The deviation of exponential gaps is their mean; that of equal ones is 0.
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)
    assert _arrivals(3, rate=None, seed=0) == _arrivals(3, rate=float("inf"), seed=0) == [0.0] * 3
