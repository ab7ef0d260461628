"""The connection of load generators: pieces as they come, when the answer ended, what breaks it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from radix_runtime.cli.raw_connection import RawConnection

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def connected(serve: Serve) -> tuple[asyncio.Server, RawConnection]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(RawConnection, "127.0.0.1", port)
    return server, connection


def test_pieces_come_one_by_one_and_the_end_is_that_of_the_last_bytes() -> None:
    async def run() -> None:
        may_end = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(100):
                writer.write(HEAD + b"1\r\na\r\n")
                await may_end.wait()
                writer.write(END)

        server, connection = await connected(serve)
        loop = asyncio.get_running_loop()
        pieces: list[tuple[int, bytes, float]] = []

        def take(status: int, piece: bytes, now: float) -> None:
            pieces.append((status, piece, now))
            loop.call_later(0.05, may_end.set)

        for count in (1, 2):
            may_end.clear()
            ending = await connection.exchange(b"x", take)
            assert [piece[:2] for piece in pieces] == [(200, b"a")] * count
            assert ending.status == 200
            assert ending.time >= pieces[-1][2] + 0.04
            assert connection.is_open and connection.has_answered
        connection.close()
        with pytest.raises(ConnectionResetError):
            await connection.exchange(b"x", take)
        server.close()

    asyncio.run(run())


def test_what_breaks_an_answer_is_raised_and_ends_the_connection() -> None:
    def refuse(status: int, piece: bytes, now: float) -> None:
        raise ValueError("not wanted")

    def drop(status: int, piece: bytes, now: float) -> None:
        pass

    async def run(answer: bytes, take: Callable[[int, bytes, float], None]) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(answer)
            writer.close()

        server, connection = await connected(serve)
        try:
            await asyncio.wait_for(connection.exchange(b"x", take), 10)
        finally:
            assert not connection.is_open
            server.close()

    with pytest.raises(ValueError, match="not wanted"):
        asyncio.run(run(HEAD + b"1\r\na\r\n" + END, refuse))
    with pytest.raises(ValueError):
        asyncio.run(run(b"no HTTP at all\r\n\r\n", drop))
    with pytest.raises(ConnectionResetError):
        asyncio.run(run(HEAD + b"5\r\na", drop))
