"""A small client of the OpenAI routes, for `chat` and `bench serve`."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from ..errors import RequestError


class Client(httpx.AsyncClient):
    """One server; `url` with or without /v1. An answer that is an error raises RequestError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {b"authorization": f"Bearer {api_key}".encode()} if api_key else {}
        base, hooks = url.rstrip("/").removesuffix("/v1"), {"response": [_check]}
        timeout, limits = httpx.Timeout(None, connect=10), httpx.Limits(max_connections=None)
        with _reachable():
            super().__init__(
                base_url=base, headers=headers, timeout=timeout, limits=limits, event_hooks=hooks
            )

    async def chunks(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer. Raises RequestError also when the stream breaks off
        without [DONE]."""
        with _reachable():
            async with self.stream("POST", path, json={**body, "stream": True}) as answer:
                done, rest = False, b""
                async for (
                    part
                ) in answer.aiter_bytes():  # to its end, after which the connection serves again
                    *lines, rest = (rest + part).split(b"\n")  # httpx would split at U+2028 too
                    events = [line[6:] for line in lines if line.startswith(b"data: ")]
                    done |= b"[DONE]" in events
                    for chunk in map(json.loads, (event for event in events if event != b"[DONE]")):
                        if "error" in chunk:
                            raise _error(500, json.dumps(chunk))
                        yield chunk
        if not done:
            raise RequestError(500, "stream_broken", "the stream ended without [DONE]")

    async def model(self) -> str:
        with _reachable():
            name: str = (await self.get("/v1/models")).json()["data"][0]["id"]
            return name


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RequestError(503, "unreachable", f"no answer from the server: {error}") from error


async def _check(answer: httpx.Response) -> None:
    if answer.is_error:
        raise _error(answer.status_code, await answer.aread())


def _error(status: int, body: bytes | str) -> RequestError:
    try:
        error = json.loads(body)["error"]
        return RequestError(status, str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):  # not of this server, but of something before it
        return RequestError(status, "unknown", f"the server answered with status {status}")
