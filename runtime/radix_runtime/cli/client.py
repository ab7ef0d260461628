"""A small client of the OpenAI routes, for `chat` and `bench serve`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from ..errors import RequestError


class Client:
    """One server. `url` without /v1."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(None, connect=10),
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> dict[str, Any]:
        """Raises RequestError."""
        try:
            answer = await self._http.get(path)
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        if answer.is_error:
            raise _refusal(answer.status_code, answer.content)
        body: dict[str, Any] = answer.json()
        return body

    async def model(self) -> str:
        name: str = (await self.get("/v1/models"))["data"][0]["id"]
        return name

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer. Raises RequestError on a refusal, on an error event,
        and when the stream breaks off without [DONE]."""
        try:
            async with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
                if answer.is_error:
                    raise _refusal(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            raise _error_of(500, chunk["error"])
                        yield chunk
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        raise RequestError(500, "stream_broken", "the stream ended without [DONE]")


def _unreachable(error: httpx.HTTPError) -> RequestError:
    return RequestError(503, "unreachable", f"no answer from the server: {error}")


def _refusal(status: int, body: bytes) -> RequestError:
    try:
        return _error_of(status, json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return RequestError(status, "unknown", f"the server answered with status {status}")


def _error_of(status: int, error: dict[str, Any]) -> RequestError:
    return RequestError(status, str(error.get("code")), str(error.get("message")))
