"""Holders of different keys: none can touch or see what another one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from radix_runtime.config import ServerArgs
from radix_runtime.errors import ConfigError, RequestError
from radix_runtime.messages import Generate
from radix_runtime.processes.api import _check_keys
from radix_runtime.processes.child import Launch
from radix_runtime.server.admission import Admission
from radix_runtime.server.auth import Access, Auth, Caller, counted_keys, keys_digest
from radix_runtime.server.labels import Label, Labels
from radix_runtime.server.shared_numbers import SharedNumbers
from tests.runtime.api_stack import LONG, Stack, in_background

A = {"authorization": "Bearer key-a"}
B = {"authorization": "Bearer key-b"}
ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "keys"
    file.write_text("key-a\nkey-b\n")
    return str(file)


@pytest.fixture
def shared(keys: str) -> Iterator[Stack]:
    with Stack(
        api_key_file=keys, admin_api_key="admin", max_requests_per_key=3, delay=0.02, pages=256
    ) as stack:
        yield stack
        stack.check_idle()
        stack.wait(lambda: stack.manager.admission.choices == 0)


def post(stack: Stack, headers: dict[str, str], path: str = "/v1/completions", **body: object):  # type: ignore[no-untyped-def]
    return httpx.post(stack.url + path, json=body, headers=headers, timeout=20)


def test_a_name_belongs_to_the_key_that_gave_it(shared: Stack) -> None:
    thread, first = in_background(lambda: post(shared, A, rid="job", **LONG))
    shared.wait(lambda: len(shared.manager._open) == 1)
    assert post(shared, B, "/abort_request", rid="job").json() == {"aborting": 0}
    answer = post(shared, B, rid="job", prompt="a", max_tokens=2)  # the name is free for B
    assert answer.status_code == 200 and answer.json()["id"] == "job"
    assert post(shared, A, rid="job", prompt="a", max_tokens=2).status_code == 400
    assert shared.manager._open, "A's goes on"
    assert post(shared, A, "/abort_request", rid="job").json() == {"aborting": 1}
    thread.join(20)
    assert first[0].json()["choices"][0]["finish_reason"] == "abort"


def test_an_operator_aborts_whose_it_may_be(shared: Stack) -> None:
    calls = [in_background(lambda key=key: post(shared, key, rid="job", **LONG)) for key in (A, B)]  # type: ignore[misc]
    shared.wait(lambda: len(shared.manager._open) == 2)
    assert post(shared, ADMIN, "/abort_request", rid="job").json() == {"aborting": 2}
    for thread, result in calls:
        thread.join(20)
        assert result[0].json()["choices"][0]["finish_reason"] == "abort"


def test_open_requests_of_a_key_are_bounded(shared: Stack) -> None:
    thread, running = in_background(lambda: post(shared, A, **LONG, n=3))
    shared.wait(lambda: len(shared.sent_of(Generate)) == 1)
    error = post(shared, A, **LONG)
    assert (error.status_code, error.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert error.headers["retry-after"] == "1"
    assert error.json()["error"]["type"] == "rate_limit_error"
    assert post(shared, B, prompt="a", max_tokens=2, n=3).status_code == 200
    assert post(shared, B, prompt="a", max_tokens=2, n=4).status_code == 400
    thread.join(20)
    assert running[0].status_code == 200
    assert post(shared, A, prompt="a", max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/generate", {"text": "a"}),
    ],
)
def test_every_route_that_generates_is_bounded(
    shared: Stack, path: str, body: dict[str, object]
) -> None:
    thread, running = in_background(lambda: post(shared, A, **LONG, n=3))
    shared.wait(lambda: len(shared.sent_of(Generate)) == 1)
    assert post(shared, A, path, **body).status_code == 429
    httpx.post(f"{shared.url}/drain", headers=ADMIN)
    assert post(shared, B, path, **body).status_code == 503
    httpx.post(f"{shared.url}/undrain", headers=ADMIN)
    thread.join(20)
    assert running[0].status_code == 200


@pytest.mark.parametrize("per_key", [False, True])
def test_cached_prefixes_of_another_key(keys: str, per_key: bool) -> None:
    with Stack(api_key_file=keys, cache_salt_per_key=per_key) as stack:
        cached = []
        for key in (A, A, B):
            usage = post(stack, key, prompt=[5] * 40, max_tokens=1).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
        assert cached == [False, True, not per_key]
        stack.check_idle()


def test_salts_are_of_one_place_each(stack: Stack) -> None:
    """No salt means what an extra key does, whatever characters are in them."""
    salts = [
        {"cache_salt": "a"},
        {"extra_key": "a"},
        {"cache_salt": "a\x1fb"},
        {"cache_salt": "a", "extra_key": "b"},
        {"extra_key": "a\x1fb"},
        {},
    ]
    ids = [7] * 40
    for fields in salts:
        cached = []
        for _ in range(2):
            body = {"prompt": ids, "max_tokens": 1, **fields}
            usage = httpx.post(f"{stack.url}/v1/completions", json=body).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
        assert cached == [False, True], fields
    stack.check_idle()


def test_labels_forget() -> None:
    labels = Labels()
    label = Label("k", "r")
    labels.add("1", label, "call")
    assert labels.abort("call", Caller("k")) == {"1"} and labels.abort("r", Caller("k")) == {"1"}
    assert labels.abort("r", Caller("other")) == set()
    with pytest.raises(RequestError):
        labels.check_new([label])
    labels.remove("1", label, "call")
    labels.check_new([label])
    assert len(labels) == 0
    for number in range(10_000):
        labels.abort(f"{number}", Caller("k"))
    assert len(labels._aborted) <= 4096


def test_a_name_is_short(stack: Stack) -> None:
    url = f"{stack.url}/abort_request"
    assert httpx.post(url, json={"rid": "x" * 256}).status_code == 200
    assert httpx.post(url, json={"rid": "x" * 257}).status_code == 400
    assert httpx.post(url, json={"rid": "x" * 60_000}).status_code == 400
    assert httpx.post(url, json={"rid": "x" * 100_000}).status_code == 413


def test_keys_from_files_and_metrics(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    file.write_text("root\n")
    args = ServerArgs(api_key="c", admin_api_key_file=str(file), metrics_api_key="m")
    auth = Auth(args, {"/metrics": Access.METRICS, "/flush": Access.ADMIN, "/x": Access.CLIENT})

    def status(path: str, key: str | None) -> int:
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        try:
            auth.check(path, headers)
        except RequestError as error:
            return error.status
        return 200

    for key, wanted in ((None, (401, 401, 401)), ("c", (401, 403, 200)), ("m", (200, 401, 401))):
        assert tuple(status(path, key) for path in ("/metrics", "/flush", "/x")) == wanted
    assert {status(path, "root") for path in ("/metrics", "/flush", "/x")} == {200}
    with pytest.raises(ConfigError, match="--admin-api-key-file"):
        Auth(ServerArgs(admin_api_key_file="/no/such/file"), {})
    with pytest.raises(ConfigError, match="--max-requests-per-key"):
        ServerArgs(max_requests_per_key=2).validate()


@pytest.mark.parametrize("bound", [None, 3])
def test_api_processes_start_with_the_same_keys(keys: str, bound: int | None) -> None:
    args = ServerArgs(api_processes=2, api_key_file=keys, max_requests_per_key=bound)
    launch = Launch(
        process="api/0",
        roles=[],
        args=args,
        directory="",
        token=b"",
        parent=0,
        heartbeat_fd=-1,
        keys=counted_keys(args),
        keys_digest=keys_digest(args),
    )
    _check_keys(launch)
    Path(keys).write_text("key-a\nkey-c\n")
    with pytest.raises(ConfigError, match="a key file has changed"):
        _check_keys(launch)


def test_a_bound_of_a_key_counts_what_it_holds() -> None:
    admission = Admission(ServerArgs(max_requests_per_key=2, api_key="x"), SharedNumbers())
    with admission.enter(1, "k"), admission.enter(1, "k"), admission.enter(1, "other"):
        with pytest.raises(RequestError) as caught:
            admission.enter(1, "k")
        assert caught.value.status == 429
        admission.enter(1).__exit__()
    admission.check("k")
    assert not admission._of_key
