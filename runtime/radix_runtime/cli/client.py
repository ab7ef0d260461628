"""A small client of the OpenAI routes, for `chat` and `bench serve`."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from ..errors import RequestError

_DONE = b"[DONE]"
_CONNECT_SECONDS = 10


class Client(httpx.AsyncClient):
    """One server; `url` with or without /v1. An answer that is an error raises RequestError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {b"authorization": f"Bearer {api_key}".encode()} if api_key else {}
        with _reachable():  # httpx refuses an invalid URL here
            super().__init__(
                base_url=url.rstrip("/").removesuffix("/v1"),
                headers=headers,
                timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None),
                event_hooks={"response": [_check]},
            )

    async def chunks(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer. Raises RequestError also when the stream breaks off
        without [DONE]."""
        is_done = False
        with _reachable():
            async with self.stream("POST", path, json={**body, "stream": True}) as answer:
                # To the end of the answer, after which its connection can serve again.
                async for event in _events(answer):
                    if event == _DONE:
                        is_done = True
                        continue
                    chunk = json.loads(event)
                    if "error" in chunk:
                        raise _error(500, event)
                    yield chunk
        if not is_done:
            raise RequestError(500, "stream_broken", message="the stream ended without [DONE]")

    async def model(self) -> str:
        """The name of the first model that the server lists."""
        with _reachable():
            answer = await self.get("/v1/models")
            name: str = answer.json()["data"][0]["id"]
            return name


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events. Lines end at newlines only; httpx splits at U+2028 too."""
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ")


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        message = f"no answer from the server: {error}"
        raise RequestError(503, "unreachable", message=message) from error


async def _check(answer: httpx.Response) -> None:
    if answer.is_error:
        raise _error(answer.status_code, await answer.aread())


def _error(status: int, body: bytes) -> RequestError:
    try:
        error = json.loads(body)["error"]
        return RequestError(status, str(error["code"]), message=str(error["message"]))
    except (ValueError, KeyError, TypeError):  # not of this server, but of something before it
        message = f"the server answered with status {status}"
        return RequestError(status, "unknown", message=message)
