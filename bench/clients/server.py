"""A server that does nothing but stream: every open answer gets an event at each tick.

Answers POST /v1/completions as OpenAI's API does, with `max_tokens` events, and GET /stats with
what it sent itself: events, and the seconds from the first to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import cast

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = {
    "id": "cmpl-0123456789abcdef01234567",
    "object": "text_completion",
    "created": 1795000000,
    "model": "stream",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
    "usage": None,
}


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(fields: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


_PIECE = _chunk(_event(_EVENT))


class Sender:
    """Sends an event to every open stream, every `tick` seconds."""

    def __init__(self, tick: float) -> None:
        self._tick = tick
        self._streams: dict[Connection, int] = {}  # events that are left
        self.events = 0
        self.first = 0.0
        self.last = 0.0

    def add(self, stream: Connection, events: int) -> None:
        """An answer of so many events begins at the next tick."""
        self._streams[stream] = events

    def remove(self, stream: Connection) -> None:
        """Nobody reads it any more."""
        self._streams.pop(stream, None)

    async def run(self) -> None:
        """For ever. A tick that comes late is not made up for."""
        due = time.perf_counter()
        while True:
            due = max(due + self._tick, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            if not self._streams:
                continue
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.events += len(self._streams)
            for stream, left in list(self._streams.items()):
                stream.send(_PIECE)
                self._streams[stream] = left - 1
                if left == 1:
                    del self._streams[stream]
                    stream.finish()


class Connection(asyncio.Protocol):
    """One client, one request at a time."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._unread = b""
        self._count = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._sender.remove(self)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        head, end, body = self._unread.partition(b"\r\n\r\n")
        if not end:
            return
        method, path = head.split(b" ", 2)[:2]
        lengths = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
        length = int(lengths[0].partition(b":")[2]) if lengths else 0
        if len(body) < length:
            return
        self._unread = body[length:]
        if method == b"POST":
            self._count = int(json.loads(body[:length])["max_tokens"])
            self._transport.write(_HEAD)
            self._sender.add(self, self._count)
        else:
            self._answer(path.decode())

    def send(self, data: bytes) -> None:
        """Writes at once."""
        self._transport.write(data)

    def finish(self) -> None:
        """The usage and the end of the answer."""
        usage = {"prompt_tokens": 1, "completion_tokens": self._count}
        last = _event({**_EVENT, "choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        self._transport.write(_chunk(last) + b"0\r\n\r\n")

    def _answer(self, path: str) -> None:
        sender = self._sender
        found: dict[str, object] = {"data": [{"id": "stream"}]}
        if path == "/stats":
            found = {"events": sender.events, "seconds": sender.last - sender.first}
            sender.events = 0
            sender.first = 0.0
        body = json.dumps(found).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self._transport.write(head.encode() + b"\r\n\r\n" + body)


async def serve(port: int, tick: float) -> None:
    """Prints the port, then serves until it is cancelled."""
    sender = Sender(tick)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(sender), "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await sender.run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.clients.server", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tick-ms", type=float, default=10.0)
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.tick_ms / 1e3))


if __name__ == "__main__":
    main()
