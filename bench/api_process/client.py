"""The clients: one that counts the events of streams, and one of a server that only writes."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from typing import Any, cast

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


class Client:
    """Counts the events of answers."""

    def __init__(self, route: str, streams: int, tokens: int) -> None:
        self._path = PATHS[route]
        self._streams = streams
        self._body = _body(route, tokens)

    async def run(self, port: int) -> tuple[int, int]:
        """All answers: how many events they had, and the bytes of a usual one."""
        counts = await asyncio.gather(*(self._answer(port) for _ in range(self._streams)))
        return sum(count for count, _ in counts), counts[0][1]

    async def _answer(self, port: int) -> tuple[int, int]:
        body = json.dumps(self._body).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        done: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: _Reader(done), "127.0.0.1", port
        )
        transport.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            return await done
        finally:
            transport.close()


class _Reader(asyncio.Protocol):
    """Counts events up to the end of a chunked answer."""

    def __init__(self, done: asyncio.Future[tuple[int, int]]) -> None:
        self._done = done
        self._events = 0
        self._sizes: list[int] = []
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        self._events += data.count(b"data: {")
        self._sizes.append(len(data))
        self._tail = (self._tail + data)[-5:]
        if self._tail == b"0\r\n\r\n" and not self._done.done():
            self._done.set_result((self._events, int(statistics.median(self._sizes))))

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the answer has no end"))


def _body(route: str, tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "ignore_eos": True}
    message = [{"role": "user", "content": "Tell me of the sea."}]
    return {
        "chat": {"messages": message, "max_tokens": tokens, "stream": True, **sampling},
        "completions": {"prompt": "The sea", "max_tokens": tokens, "stream": True, **sampling},
        "generate": {
            "text": "The sea",
            "stream": True,
            "incremental_streaming_output": True,
            "sampling_params": {"max_new_tokens": tokens, **sampling},
        },
        "messages": {
            "model": "default",
            "messages": message,
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0.0,
        },
        "responses": {
            "input": "Tell me of the sea.",
            "max_output_tokens": tokens,
            "stream": True,
            "temperature": 0.0,
        },
    }[route]


async def write_only(size: int, streams: int, ticks: int, seconds: float) -> float:
    """Seconds of this thread for a write of `size` bytes to one of `streams` connections, whose
    other ends a process reads; there are `ticks` writes to each, one every so many `seconds`."""
    piece = b"x" * size
    accepted: list[asyncio.Transport] = []

    class Writer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.append(cast(asyncio.Transport, transport))

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Writer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _DRAIN, str(port), str(streams))
    )
    while len(accepted) < streams:
        await asyncio.sleep(0.01)
    began = time.thread_time()
    for _ in range(ticks):
        for transport in accepted:
            transport.write(piece)
        await asyncio.sleep(seconds)  # the loop sends when it has its turn
    spent = time.thread_time() - began
    reader.kill()
    await reader.wait()
    return spent / (ticks * streams)


_DRAIN = """
import asyncio, sys, uvloop

async def main():
    connect = asyncio.get_running_loop().create_connection
    for _ in range(int(sys.argv[2])):
        await connect(asyncio.Protocol, "127.0.0.1", int(sys.argv[1]))
    await asyncio.sleep(3600)

uvloop.run(main())
"""
