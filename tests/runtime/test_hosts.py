"""By which names, and from which pages, a server without a key may be called."""

from __future__ import annotations

import httpx
import pytest

from radix_runtime.config import ServerArgs
from radix_runtime.errors import RequestError
from radix_runtime.server.hosts import HostRules
from tests.runtime.api_stack import MODEL, Stack
from tests.runtime.bad_requests import CHAT, good_request


def answer(name: str | None, origin: str | None = None, **settings: str) -> str:
    """ "", or the code of the refusal."""
    headers = []
    if name is not None:
        headers.append((b"host", name.encode()))
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    try:
        HostRules(ServerArgs(**settings)).check(headers)
    except RequestError as error:
        return error.code
    return ""


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:30000", "127.0.0.1:30000", "127.0.0.2", "[::1]:30000", "10.1.2.3:80"],
)
def test_names_of_this_machine(host: str) -> None:
    assert answer(host) == "" == answer(host, f"http://{host}")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:30000", "localhost.evil.example",
                                  "127.0.0.1.evil.example", "", "[evil]", "x:y:z"])  # fmt: skip
def test_other_names(host: str) -> None:
    assert answer(host) == "host_not_allowed" == answer(host, f"http://{host}")
    # On another address than loopback a program may call by any name, a page may not.
    assert answer(host, host="0.0.0.0") == ""
    assert answer(host, f"http://{host}", host="0.0.0.0") == "host_not_allowed"


def test_names_that_were_given() -> None:
    for setting in ("box.local", "other,Box.Local ", "*"):
        assert answer("box.local:30000", allowed_hosts=setting) == ""
    assert answer("box.local", host="box.local") == ""
    assert answer("sub.box.local", allowed_hosts="box.local") == "host_not_allowed"
    assert answer(None) == "invalid_http"


def test_pages() -> None:
    assert answer("localhost:3", "http://localhost:3") == ""
    for origin in ("http://localhost:4", "https://page.example", "null"):
        assert answer("localhost:3", origin) == "origin_not_allowed"
    allowed = "https://page.example,https://b.example"
    assert answer("localhost:3", "https://page.example", allowed_origins=allowed) == ""
    assert answer("localhost:3", "https://page.example", allowed_origins="*") == ""
    assert answer("localhost:3", "https://c.example", allowed_origins=allowed) != ""


def test_dns_rebinding(stack: Stack) -> None:
    """A page whose name resolves to this address: the same origin for its browser."""
    evil = {"host": f"evil.example:{stack.port}", "origin": f"http://evil.example:{stack.port}"}
    before = len(stack.sent)
    for response in (
        httpx.post(stack.url + CHAT, json=good_request(MODEL), headers=evil),
        httpx.get(f"{stack.url}/metrics", headers=evil),
        httpx.post(f"{stack.url}/flush_cache", headers={"origin": "https://page.example"}),
    ):
        assert response.status_code == 403 and "x-request-id" in response.headers
        assert response.json()["error"]["code"] in ("host_not_allowed", "origin_not_allowed")
    assert len(stack.sent) == before
    with Stack(api_key="key") as locked:  # no page has the key
        headers = {**evil, "authorization": "Bearer key"}
        url = f"{locked.url}/v1/models"
        assert httpx.get(url, headers=headers).status_code == 200
