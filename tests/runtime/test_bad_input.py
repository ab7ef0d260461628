"""Every malformed request is told what is wrong, and nothing else suffers from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from tests.runtime.api_stack import CONTEXT, MODEL, VOCAB, Stack
from tests.runtime.bad_requests import CHAT, Bad, bad_requests, good_request

CASES = bad_requests(MODEL, VOCAB, CONTEXT)
LEAKS = re.compile(r"Traceback|/[a-z_]+/[a-z_]+\.py|site-packages|0x[0-9a-f]{6,}|msgspec|Struct")


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=20) as client:
        yield client


def send(client: httpx.Client, bad: Bad) -> httpx.Response:
    headers = {"content-type": bad.content_type} if bad.content_type else {}
    return client.request(
        bad.method, bad.path, content=bad.payload(), headers=headers | dict(bad.headers)
    )


def test_the_table_is_long_enough_and_its_names_differ() -> None:
    assert len(CASES) >= 40
    assert len({bad.name for bad in CASES}) == len(CASES)


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_bad_request(stack: Stack, client: httpx.Client, bad: Bad) -> None:
    before = len(stack.sent)
    response = send(client, bad)
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    got = (response.status_code, error["type"], error["code"], error["param"])
    assert got == (bad.status, bad.type, bad.code, bad.param), error["message"]
    assert error["message"] and len(response.content) < 1000
    assert not LEAKS.search(response.text)
    assert response.headers["x-request-id"]
    assert ("allow" in response.headers) == (bad.status == 405)
    assert len(stack.sent) == before, "something of a bad request reached the scheduler"
    good = client.post(CHAT, json=good_request(MODEL))
    assert good.status_code == 200 and good.json()["usage"]["completion_tokens"] >= 1
    stack.check_idle()


def test_too_long_says_both_numbers(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": [5] * 200, "max_tokens": 100}
    message = client.post("/v1/completions", json=body).json()["error"]["message"]
    for number in ("200", "100", "300", str(CONTEXT)):
        assert number in message


def test_what_can_never_fit_the_cache() -> None:
    with Stack(pages=16) as stack, httpx.Client(base_url=stack.url) as client:
        body = {"model": MODEL, "prompt": [5] * 60, "max_tokens": 5}
        error = client.post("/v1/completions", json=body).json()["error"]
        assert error["code"] == "kv_capacity_exceeded" and "64" in error["message"]
        fits = client.post("/v1/completions", json={**body, "max_tokens": 4, "ignore_eos": True})
        assert fits.json()["usage"]["completion_tokens"] == 4
        absent = client.post(CHAT, json={**good_request(MODEL), "max_tokens": None})
        assert absent.status_code == 200
        stack.check_idle()


def test_neutral_values_pass(client: httpx.Client) -> None:
    neutral = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
        "parallel_tool_calls": True, "logit_bias": {}, "functions": None, "top_logprobs": 0,
        "stop": None, "seed": None, "n": 1, "user": "u", "metadata": {"a": "b"}, "store": False,
        "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "k",
        "chat_template_kwargs": {"enable_thinking": False}, "stream_options": None,
    }  # fmt: skip
    response = client.post(CHAT, json={**good_request(MODEL), **neutral})
    assert response.status_code == 200, response.text
    assert "warnings" not in response.json()


def test_lenient_mode_warns() -> None:
    with Stack(allow_unknown_fields=True) as stack, httpx.Client(base_url=stack.url) as client:
        body = {**good_request(MODEL), "frobnicate": 1, "tools": []}
        answer = client.post(CHAT, json=body).json()
        assert answer["warnings"] == ["unknown parameter frobnicate was ignored"]
        streamed = client.post(CHAT, json={**body, "stream": True}).text.split("\n\n")
        first, second = (json.loads(frame[6:]) for frame in streamed[:2])
        assert first["warnings"] == answer["warnings"] and "warnings" not in second
        many = {f"x{i}": i for i in range(50)}
        assert len(client.post(CHAT, json={**body, **many}).json()["warnings"]) == 10
        # What is known but not built is refused in this mode too.
        refused = client.post(CHAT, json={**body, "prediction": {"type": "content"}})
        assert refused.json()["error"]["code"] == "unsupported_parameter"
        stack.check_idle()


def test_duplicate_rid(stack: Stack, client: httpx.Client) -> None:
    body = {"text": ["a", "b"], "rid": ["same", "same"], "sampling_params": {"max_new_tokens": 1}}
    error = client.post("/generate", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "rid")
    stack.check_idle()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {**good_request(MODEL), "min_tokens": 5},
         "min_tokens must be in [0, max_tokens], got 5"),
        ("/generate", {"text": "a", "sampling_params": {"temperature": -1}},
         "temperature must be in [0, 1e+06], got -1"),
    ],
)  # fmt: skip
def test_messages_use_the_names_of_the_route(
    client: httpx.Client, path: str, body: dict[str, object], message: str
) -> None:
    error = client.post(path, json=body).json()["error"]
    assert error["message"].removesuffix(".0") == message
