"""No request holds the event loop: the time of its callbacks beside requests made to hold it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.runtime.api_stack import MODEL, Stack
from tests.runtime.bad_requests import CHAT, good_request
from tests.runtime.test_json_scan import DEEP_AND_MALFORMED

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    with Stack(monitored=True, pages=256) as stack:
        for _ in range(2):  # what only the first request costs is no request's fault
            httpx.post(stack.url + CHAT, json=good_request(MODEL)).raise_for_status()
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    shared.on_loop(shared.monitor.reset)
    yield shared
    shared.check_idle()


def post(stack: Stack, path: str, body: bytes) -> httpx.Response:
    return httpx.post(stack.url + path, content=body, headers=JSON, timeout=60)


def test_a_malformed_body_does_not_hold_the_loop(stack: Stack) -> None:
    for _ in range(5):
        response = post(stack, CHAT, DEEP_AND_MALFORMED)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    stack.monitor.check()


def test_a_long_number_is_refused_and_not_repeated(stack: Stack) -> None:
    body = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":' + b"9" * 400 + b"}"
    response = post(stack, CHAT, body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    assert len(response.content) < 200
    stack.monitor.check()
