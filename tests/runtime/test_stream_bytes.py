"""Pieces of a stream that are sent at once: the same bytes as by the task of the call, and what
becomes of clients that do not read and of errors."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import pytest

from radix_runtime.channel import LocalChannel
from radix_runtime.messages import (
    FinishReason,
    Generate,
    Logprobs,
    Message,
    TokenBatch,
    TokenDelta,
    pack_ids,
)
from radix_runtime.server import http_call
from radix_runtime.server.chunk_writer import ChunkWriter
from radix_runtime.server.openai_chat import ChatAnswer
from tests.runtime.agent_rig import SCHEMA, TURNS
from tests.runtime.scripted_server import MODEL, ScriptedServer
from tests.runtime.tool_templates import HERMES

SECONDS = 60.0  # until a test gives up
TEXT = 'The "harbour" is quiet: näive 🙂 gulls.\nA second line\tends here.'
USER = [{"role": "user", "content": "?"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.0005)


class _Stepping(LocalChannel):
    """Each message is worked off before the next one is sent."""

    def __init__(self, step: Callable[[], object]) -> None:
        super().__init__()
        self._step = step

    def send(self, message: Message, instance: int = 0) -> None:
        super().send(message, instance)
        self._step()


class PacedServer(ScriptedServer):
    """Gives each token as a message of its own, and log-probabilities where they are wanted.
    `is_paced`: a token comes only when what came before it has been sent."""

    def __init__(self, *, is_paced: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self._is_paced = is_paced
        ids = _Stepping(lambda: self._detokenizer.step())
        self._detokenizer._inbox = ids
        self._ids = ids

    def _to_api(self, message: Message) -> None:
        super()._to_api(message)
        if self._is_paced:
            wait_for(lambda: self.on_loop(self._all_sent))

    def _all_sent(self) -> bool:
        return all(request.submission._reader_waits for request in self.manager._open.values())

    def on_loop(self, work: Callable[[], bool]) -> bool:
        """What `work` gives on the event loop's thread."""
        result: Future[bool] = Future()
        self._loop.call_soon_threadsafe(lambda: result.set_result(work()))
        return result.result(SECONDS)

    def _answer(self, request: Generate, choice: int, text: str) -> None:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        limit = request.sampling.max_new_tokens or 0
        finish = FinishReason("length" if len(ids) > limit else "stop")
        ids = ids[:limit]
        for at, token in enumerate(ids):
            is_last = at + 1 == len(ids)
            self._ids.send(
                TokenBatch(
                    [
                        TokenDelta(
                            rid=request.rid,
                            choice=choice,
                            ids=pack_ids([token]),
                            finish=finish if is_last else None,
                            completion_tokens=at + 1,
                            logprobs=_logprobs(token) if request.return_logprob else None,
                            sampling=request.sampling if at == 0 else None,
                            input_ids=b"" if at == 0 else None,
                        )
                    ]
                )
            )


def _logprobs(token: int) -> Logprobs:
    return Logprobs(
        ids=pack_ids([token]),
        logprobs=np.float32([-0.5]).tobytes(),
        top_n=1,
        top_ids=pack_ids([token]),
        top_logprobs=np.float32([-0.5]).tobytes(),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PacedServer]:
    file = tmp_path_factory.mktemp("template") / "hermes.jinja"
    file.write_text(HERMES)
    with PacedServer(chat_template=str(file)) as server:
        yield server


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What has been sent at once."""
    found: list[bytes] = []
    write = ChunkWriter.write

    def noted(writer: ChunkWriter, data: bytes) -> None:
        found.append(data)
        write(writer, data)

    monkeypatch.setattr(ChunkWriter, "write", noted)
    return found


def chunks(server: ScriptedServer, path: str, body: dict[str, Any]) -> list[bytes]:
    """The chunks of an answer, as they are framed on the wire."""
    port = httpx.URL(server.url).port
    data = json.dumps({"rid": "mine", "stream": True, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        stream = client.makefile("rb")
        status = stream.readline()
        while stream.readline() != b"\r\n":
            pass
        assert status == b"HTTP/1.1 200 OK\r\n", stream.read(500)
        found = []
        while size := int(stream.readline(), 16):
            found.append(stream.read(size))
            assert stream.readline() == b"\r\n"
        assert stream.readline() == b"\r\n"
        return found


_VARIES = re.compile(
    rb'(?P<name>"created(?:_at)?":|"e2e_latency":|"(?:fc|rs|msg|call)_)(?P<value>[0-9a-zA-Z.e-]+)'
)


def without_chance(found: list[bytes]) -> list[bytes]:
    """The chunks without times and random ids."""
    return [_VARIES.sub(rb"\g<name>", chunk) for chunk in found]


CHAT = {"messages": USER, "model": MODEL, "max_tokens": 500}
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "chat": ("/v1/chat/completions", CHAT, [TEXT]),
    "chat with usage": (
        "/v1/chat/completions",
        {**CHAT, "stream_options": {"include_usage": True}},
        [TEXT],
    ),
    "chat with running usage": (
        "/v1/chat/completions",
        {
            **CHAT,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        [TEXT],
    ),
    "chat with choices": ("/v1/chat/completions", {**CHAT, "n": 2}, [TEXT, TEXT[5:]]),
    "chat with logprobs": (
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 1},
        [TEXT],
    ),
    "chat with reasoning": ("/v1/chat/completions", CHAT, [TURNS[2]]),
    "chat with tools": ("/v1/chat/completions", {**CHAT, "tools": TOOLS}, [TURNS[0]]),
    "chat with two calls": (
        "/v1/chat/completions",
        {**CHAT, "tools": TOOLS, "n": 2},
        [TURNS[0] + "\n" + TURNS[1].partition("\n\n")[2], TURNS[1]],
    ),
    "chat that is cut": ("/v1/chat/completions", {**CHAT, "max_tokens": 5}, [TEXT]),
    "completions": ("/v1/completions", {"prompt": "a", "max_tokens": 500}, [TEXT]),
    "completions with stop": (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 500, "stop": ["gulls"]},
        [TEXT],
    ),
    "completions of two prompts": (
        "/v1/completions",
        {"prompt": ["a", "b"], "max_tokens": 500, "echo": True},
        [TEXT, TEXT[9:]],
    ),
    "completions with logprobs": (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 500, "logprobs": 1},
        [TEXT],
    ),
    "responses": ("/v1/responses", {"input": "a"}, [TEXT]),
    "responses with tools": (
        "/v1/responses",
        {
            "input": "a",
            "tools": [{"type": "function", "name": "get_weather", "parameters": SCHEMA}],
        },
        [TURNS[0]],
    ),
    "messages": (
        "/v1/messages",
        {"model": MODEL, "messages": USER, "max_tokens": 500},
        [TEXT],
    ),
    "messages with tools": (
        "/v1/messages",
        {
            "model": MODEL,
            "messages": USER,
            "max_tokens": 500,
            "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        },
        [TURNS[0]],
    ),
    "generate": ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 500}}, [TEXT]),
    "generate in pieces": (
        "/generate",
        {
            "text": "a",
            "incremental_streaming_output": True,
            "sampling_params": {"max_new_tokens": 500},
        },
        [TEXT],
    ),
}
ALL_BY_TASK = {"chat with logprobs", "completions with logprobs", "generate"}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_the_task(
    server: PacedServer, sent: list[bytes], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk, so that there is one event a token both times."""
    path, body, answers = CASES[case]
    monkeypatch.setattr(http_call, "SLICE_SECONDS", 1e9)  # or a busy machine cuts events in two
    found = []
    for at_once in (True, False):
        monkeypatch.setattr(ChunkWriter, "takes_more", ChunkWriter.takes_more if at_once else False)
        server.answers = list(answers)
        sent.clear()
        found.append(without_chance(chunks(server, path, body)))
        assert bool(sent) == (at_once and case not in ALL_BY_TASK)
    assert found[0] == found[1] and len(found[0]) > 5


def test_every_token_is_an_event(
    server: PacedServer, sent: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last are the task's."""
    monkeypatch.setattr(http_call, "SLICE_SECONDS", 1e9)
    text = "one two three four five six seven eight nine ten " * 4
    server.answers = [text]
    found = chunks(server, "/v1/completions", {"prompt": "a", "max_tokens": 500})
    tokens = len(server.tokenizer.encode(text, add_special_tokens=False))
    assert len(found) == tokens + 1 and found[-1] == b"data: [DONE]\n\n"
    assert len(sent) == tokens - 2
    shown = [json.loads(chunk[6:])["choices"][0]["text"] for chunk in found[:-1]]
    assert "".join(shown) == text and found[1:-2] == sent


def test_an_error_in_a_piece_ends_its_call_alone(
    server: PacedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(answer: ChatAnswer, index: int, delta: object) -> bytes:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(ChatAnswer, "text_frames", broken)
        server.answers = [TEXT]
        found = chunks(server, "/v1/chat/completions", CHAT)
        assert json.loads(found[-1][6:])["error"]["code"] == "internal_error"
    assert not server.manager._open
    server.answers = [TEXT]
    assert chunks(server, "/v1/chat/completions", CHAT)[-1] == b"data: [DONE]\n\n"


def test_a_client_that_does_not_read_gets_all_in_fewer_events() -> None:
    """What it does not take is merged, and the connection's buffer stays bounded."""
    text = "".join(f"{number} " for number in range(1000))
    data = json.dumps({"prompt": "a", "max_tokens": 9000, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with PacedServer(is_paced=False) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(SECONDS)
        client.connect(("127.0.0.1", httpx.URL(server.url).port or 0))
        connections = server._server.server_state.connections
        wait_for(lambda: len(connections) == 1)
        (connection,) = connections
        connection.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
        )
        server.answers = [text]
        client.sendall(head.encode() + data)
        wait_for(lambda: server.manager.counts.ok == 1)  # all has come
        assert server.on_loop(lambda: connection.flow.write_paused)
        assert connection.transport.get_write_buffer_size() < 100_000
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    events = [line for line in answer.split(b"\r\n") if line.startswith(b"data: {")]
    shown = [json.loads(event[6:].split(b"\n")[0])["choices"][0]["text"] for event in events]
    assert "".join(shown) == text
    assert len(events) < len(server.tokenizer.encode(text, add_special_tokens=False)) / 2
