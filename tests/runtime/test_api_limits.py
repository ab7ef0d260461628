"""Keys and sizes: what must be refused before a handler sees it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from radix_runtime.config import ServerArgs
from radix_runtime.errors import ConfigError
from radix_runtime.server.auth import Access, Auth
from tests.runtime.api_stack import MODEL, Stack
from tests.runtime.bad_requests import CHAT, good_request

KEY = "sk-clé"
ADMIN = "sk-admin"
PUBLIC = {"/health", "/ping", "/ready", "/health_generate", "/metrics"}
ADMIN_ROUTES = {"/flush_cache", "/server_info", "/get_server_info", "/step_trace"}


@pytest.fixture(scope="module")
def locked() -> Iterator[Stack]:
    with Stack(api_key=KEY, admin_api_key=ADMIN, max_body_size=20_000) as stack:
        yield stack


def bearer(key: str) -> dict[str, bytes]:
    return {"authorization": b"Bearer " + key.encode()}


def routes(stack: Stack) -> list[tuple[str, str]]:
    app = stack.app
    assert isinstance(app, FastAPI)
    return [
        (method, route.path.replace("{model:path}", "x"))
        for route in app.router.routes
        for method in sorted(route.methods)  # type: ignore[attr-defined]
    ]


def test_every_route_needs_a_key_unless_listed(locked: Stack) -> None:
    found = routes(locked)
    assert len(found) >= 25
    with httpx.Client(base_url=locked.url) as client:
        for method, path in found:
            if path in PUBLIC:
                assert client.request(method, path).status_code == 200, path
                continue
            for headers in ({}, bearer("wrong")):
                response = client.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert response.json()["error"]["type"] == "authentication_error"
                    assert response.json()["error"]["code"] == "invalid_api_key"
            with_key = client.request(method, path, headers=bearer(KEY)).status_code
            assert with_key == 403 if path in ADMIN_ROUTES else with_key != 401
            with_admin = client.request(method, path, headers=bearer(ADMIN))
            assert with_admin.status_code not in (401, 403), (method, path)


@pytest.mark.parametrize(
    "target",
    ["//v1/models", "/v1/../v1/models", "/v1%2fmodels", "/health/../v1/models", "/metrics/x",
     "/health/", "/nothing", "/HEALTH", "http://evil/health", "/v1/models?x=/health"],
)  # fmt: skip
@pytest.mark.parametrize("host", ["x", "evil/health?", "127.0.0.1:1/metrics#"])
def test_odd_paths_and_hosts_open_nothing(locked: Stack, target: str, host: str) -> None:
    request = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    status, _ = raw(locked, request.encode())
    assert status in (400, 401), (target, host)


@pytest.mark.parametrize(
    "value",
    [b"", b"Bearer", b"bearer  sk-cl\xc3\xa9", b"Basic sk-cl\xc3\xa9", b"sk-cl\xc3\xa9",
     b"Bearer \xff\xfe", b"Bearer sk-cl\xe9", b"Bearer sk-cl\xc3\xa9x", b"Bearer " + b"a" * 10_000],
)  # fmt: skip
def test_wrong_keys(locked: Stack, value: bytes) -> None:
    response = httpx.get(f"{locked.url}/v1/models", headers={"authorization": value})
    assert response.status_code == 401


def test_right_keys_and_two_keys(locked: Stack) -> None:
    for header in (b"Bearer sk-cl\xc3\xa9", b"bearer sk-cl\xc3\xa9"):
        good = httpx.get(f"{locked.url}/v1/models", headers={"authorization": header})
        assert good.status_code == 200
    twice = [(b"authorization", b"Bearer sk-cl\xc3\xa9")] * 2
    assert httpx.get(f"{locked.url}/v1/models", headers=twice).status_code == 401


def test_abort_all_is_for_admins(locked: Stack) -> None:
    url = f"{locked.url}/abort_request"
    one = httpx.post(url, json={"rid": "x"}, headers=bearer(KEY))
    everything = httpx.post(url, json={"abort_all": True}, headers=bearer(KEY))
    assert (one.status_code, everything.status_code) == (200, 403)
    assert httpx.post(url, json={"abort_all": True}, headers=bearer(ADMIN)).status_code == 200


def test_keys_never_show(locked: Stack) -> None:
    text = httpx.get(f"{locked.url}/server_info", headers=bearer(ADMIN)).text
    assert KEY not in text and json.dumps(KEY) not in text and ADMIN not in text
    assert json.loads(text)["api_key"] == "***"


def test_only_an_admin_key() -> None:
    with Stack(admin_api_key=ADMIN) as stack:
        assert httpx.get(f"{stack.url}/v1/models").status_code == 200
        assert httpx.post(f"{stack.url}/flush_cache").status_code == 401
        assert httpx.post(f"{stack.url}/flush_cache", headers=bearer(ADMIN)).status_code == 200


def test_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    auth = Auth(ServerArgs(api_key_file=str(file)), {"/health": Access.PUBLIC})
    for key in (b"one", b"two"):
        assert auth.check("/anything", [(b"authorization", b"Bearer " + key)]).key
    for content in (None, "\n"):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        with pytest.raises(ConfigError, match="--api-key-file"):
            Auth(ServerArgs(api_key_file=str(file)), {})


# Pages of other origins -------------------------------------------------------------------

PAGE = "https://page.example"
STRANGER = "https://stranger.example"


def asks(method: str, url: str, origin: str, **headers: str) -> httpx.Response:
    """What a browser sends before a page's script may call with a key."""
    wanted = {
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type",
    }
    return httpx.options(url, headers={"origin": origin, **wanted, **headers})


def test_no_origin_may_call_by_default(locked: Stack) -> None:
    assert asks("POST", locked.url + CHAT, PAGE).status_code == 401
    answer = httpx.get(f"{locked.url}/v1/models", headers={**bearer(KEY), "origin": PAGE})
    assert answer.status_code == 200
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_allowed_origins() -> None:
    with Stack(api_key=KEY, allowed_origins="http://localhost:3000,https://page.example") as stack:
        asked = asks("POST", stack.url + CHAT, PAGE)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in asked.headers
        assert "access-control-allow-origin" not in asks("POST", stack.url + CHAT, STRANGER).headers
        near = {"access-control-request-private-network": "true"}
        asked = asks("POST", stack.url + CHAT, PAGE, **near)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-private-network"] == "true"
        assert asks("POST", stack.url + CHAT, STRANGER, **near).status_code == 400
        for origin, shown in ((PAGE, PAGE), (STRANGER, None)):
            # Asking first needs no key, calling does; a page may read the error, and whole answers
            # and streams alike.
            headers = {"origin": origin}
            refused = httpx.post(stack.url + CHAT, json=good_request(MODEL), headers=headers)
            assert refused.status_code == 401
            body = {**good_request(MODEL), "stream": True}
            answered = httpx.post(stack.url + CHAT, json=body, headers={**headers, **bearer(KEY)})
            assert answered.status_code == 200 and answered.text.endswith("data: [DONE]\n\n")
            for response in (refused, answered):
                assert response.headers.get("access-control-allow-origin") == shown
                assert "x-request-id" in response.headers
        stack.check_idle()


def test_all_origins() -> None:
    with Stack(allowed_origins="*") as stack:
        url = f"{stack.url}/v1/models"
        assert asks("GET", url, STRANGER).headers["access-control-allow-origin"] == "*"
        # Nobody has named this page: from outside it does not reach a server in a private network.
        near = {"access-control-request-private-network": "true"}
        assert asks("GET", url, STRANGER, **near).status_code == 400


# Sizes ------------------------------------------------------------------------------------


def raw(stack: Stack, data: bytes) -> tuple[int, bytes]:
    """Status and rest of the answer to bytes that no client library would send."""
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as connection:
        try:
            connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        while True:
            try:
                part = connection.recv(1 << 16)
            except ConnectionResetError:
                break
            answer += part
            if not part:
                break
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def post_head(stack: Stack, *lines: bytes) -> bytes:
    first = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    first += b"content-type: application/json\r\n"
    auth = b"authorization: Bearer sk-cl\xc3\xa9\r\n"
    return first + auth + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def test_declared_body_too_large(locked: Stack) -> None:
    """Refused at once: nothing of the body was sent."""
    status, body = raw(locked, post_head(locked, b"content-length: 999999999"))
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


def test_chunked_body_too_large(locked: Stack) -> None:
    """No length is declared; what comes is counted, and the endless body is cut off."""
    chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
    status, body = raw(locked, post_head(locked, b"transfer-encoding: chunked") + chunk * 21)
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


def test_a_body_of_just_the_limit_passes(locked: Stack) -> None:
    body = json.dumps(good_request(MODEL)).encode()
    for size, status in ((20_000, 200), (20_001, 413)):
        padded = body + b" " * (size - len(body))
        headers = {**bearer(KEY), "content-type": "application/json"}
        assert httpx.post(locked.url + CHAT, content=padded, headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/abort_request", "/start_profile", "/stop_profile"])
def test_routes_without_a_text_take_short_bodies(stack: Stack, path: str) -> None:
    for size, is_taken in ((64 << 10, True), ((64 << 10) + 1, False)):
        padded = b"{}".ljust(size)
        headers = {"content-type": "application/json"}
        answer = httpx.post(stack.url + path, content=padded, headers=headers)
        assert (answer.status_code != 413) == is_taken, answer.text


@pytest.mark.parametrize("length", [b"-5", b"+5", b"1e3", b"99999999999999999999"])
def test_odd_content_length(locked: Stack, length: bytes) -> None:
    status, _ = raw(locked, post_head(locked, b"content-length: " + length, b"connection: close"))
    assert status in (400, 413)


def test_headers_too_large(locked: Stack) -> None:
    big = b"x-padding: " + b"a" * (70 << 10)
    many = [b"x-%d: 1" % i for i in range(101)]
    for lines in ([big], many):
        status, body = raw(
            locked, post_head(locked, *lines, b"content-length: 0", b"connection: close")
        )
        assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")
    status, _ = raw(locked, post_head(locked, b"x-padding: " + b"a" * (2 << 20)))
    assert status == 431  # parsing has ended before


def test_slow_body_is_dropped(locked: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radix_runtime.server.incoming_body.BODY_IDLE", 0.2)
    status, body = raw(locked, post_head(locked, b"content-length: 100") + b"{")
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")


def test_content_type_may_have_parameters(locked: Stack) -> None:
    headers = {**bearer(KEY), "content-type": "Application/JSON; charset=utf-8"}
    body = json.dumps(good_request(MODEL))
    assert httpx.post(locked.url + CHAT, content=body, headers=headers).status_code == 200
    locked.check_idle()


def test_idle_connections_do_not_stop_a_client(locked: Stack) -> None:
    idle = [socket.create_connection(("127.0.0.1", locked.port)) for _ in range(200)]
    try:
        for connection in idle[:100]:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
        assert httpx.get(f"{locked.url}/health", timeout=5).status_code == 200
    finally:
        for connection in idle:
            connection.close()
