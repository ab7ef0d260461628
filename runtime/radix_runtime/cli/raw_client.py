"""RawClient: short HTTP/1.1 calls for a load generator, at a tenth of a general client's CPU."""

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..errors import RequestError
from .raw_connection import RawConnection


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `prefix` comes before the path."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    api_key: str | None

    def request(self, method: str, path: str, body: Any = None, accept: str = "*/*") -> bytes:
        """A whole request; `body` becomes JSON."""
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            f"Accept: {accept}",
            f"Content-Length: {len(data)}",
        ]
        if data:
            lines.append("Content-Type: application/json")
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + data


def target_of(url: str, api_key: str | None) -> Target:
    """Raises RequestError for what is no address."""
    try:
        parts = urlsplit(url)
        port = parts.port
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it is no address of a web server")
    except ValueError as error:
        message = f"no answer from the server: {url}: {error}"
        raise RequestError(503, "unreachable", message=message) from error
    is_tls = parts.scheme == "https"
    return Target(
        host=parts.hostname,
        port=port or (443 if is_tls else 80),
        is_tls=is_tls,
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
        api_key=api_key,
    )


class RawClient:
    """Calls to one server over connections that are kept. A call takes one that is idle, or opens
    another. Belongs to one event loop."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[RawConnection] = []
        self._tls = ssl.create_default_context() if target.is_tls else None

    async def call(
        self, method: str, path: str, body: Any = None, seconds: float = 60.0
    ) -> tuple[int, bytes]:
        """Status and body of the answer. Raises OSError, ValueError where it is no HTTP, and
        asyncio.TimeoutError after `seconds`."""
        request = self._target.request(method, path, body)
        return await asyncio.wait_for(self._call(request), seconds)

    def close(self) -> None:
        """Ends the connections, which no call may use then."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _call(self, request: bytes) -> tuple[int, bytes]:
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._exchange(connection, request)
            except ConnectionError:
                if connection.has_answered:
                    raise
                # The server has closed what was idle for long while this was on its way.
        return await self._exchange(await self._connect(), request)

    async def _exchange(self, connection: RawConnection, request: bytes) -> tuple[int, bytes]:
        parts: list[bytes] = []

        def take(status: int, piece: bytes, now: float) -> None:
            parts.append(piece)

        try:
            ending = await connection.exchange(request, take)
        except BaseException:  # a cancelled call, too, leaves the rest of its answer behind
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return ending.status, b"".join(parts)

    async def _connect(self) -> RawConnection:
        loop = asyncio.get_running_loop()
        target = self._target
        _, protocol = await loop.create_connection(
            RawConnection, target.host, target.port, ssl=self._tls
        )
        return protocol
