"""Chat templates that loop or allocate: they cost their own request, and nobody else anything."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from radix_runtime.server import chat_renderer
from radix_runtime.server.helper_process import HelperProcess
from tests.runtime.api_stack import MODEL, Stack, in_background
from tests.runtime.bad_requests import CHAT

# Harmless unless the user says otherwise.
TEMPLATE = """{%- for message in messages %}{{ message.content }}{% endfor %}
{%- if 'loop' in messages[0].content %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif 'eat' in messages[0].content %}{{ '%1000000000d' % messages|length }}
{%- elif 'pile' in messages[0].content %}{% set ns = namespace(x='aaaaaaaa') %}
{%- for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}
{%- elif 'refuse' in messages[0].content %}{{ raise_exception('not so') }}{% endif %}"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    file = tmp_path_factory.mktemp("template") / "t.jinja"
    file.write_text(TEMPLATE)
    with Stack(chat_template=str(file), pages=256, monitored=True) as stack:
        yield stack


def chat(stack: Stack, text: str) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return httpx.post(stack.url + CHAT, json=body, timeout=20)


def code(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["code"])


def test_what_is_stopped_is_a_400_and_others_go_on(stack: Stack) -> None:
    assert chat(stack, "hello").status_code == 200
    for text in ("loop", "eat", "pile"):
        start = time.monotonic()
        thread, stopped = in_background(lambda text=text: chat(stack, text))  # type: ignore[misc]
        others = []
        while thread.is_alive():
            others.append(httpx.post(f"{stack.url}/generate", json={"text": "a"}).status_code)
            others.append(chat(stack, "hello").status_code)
        thread.join()
        assert time.monotonic() - start < 2.0 + 8.0  # a new process may have to start
        assert code(stopped[0]) == "template_failed"
        assert set(others) <= {200}
    assert code(chat(stack, "refuse")) == "chat_template_error"
    assert "not so" in chat(stack, "refuse").text
    answer = httpx.post(f"{stack.url}/v1/responses", json={"input": "refuse"}).json()
    assert answer["error"]["param"] == "input", "what this route calls the conversation"
    assert httpx.get(f"{stack.url}/health_generate", timeout=20).status_code == 200
    stack.check_idle()


def test_memory_is_bounded() -> None:
    template = chat_renderer.ChatTemplate("{{ 'x' * messages[0].content|int }}", {})
    renderer = chat_renderer.ChatRenderer(template)
    try:
        many = renderer.render([{"role": "user", "content": "1000000"}], {})
        assert many == "x" * 1_000_000
        with pytest.raises(chat_renderer.RequestError) as caught:
            renderer.render([{"role": "user", "content": str(chat_renderer.MEMORY)}], {})
        assert caught.value.code == "template_failed"
    finally:
        renderer.close()


def test_a_template_that_always_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_renderer, "SECONDS", 0.3)
    source = "{% if messages[0].content == 'x' %}x{% else %}"
    source += (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    )
    renderer = chat_renderer.ChatRenderer(chat_renderer.ChatTemplate(source, {}))

    def outcome(text: str) -> str:
        try:
            return renderer.render([{"role": "user", "content": text}], {})
        except chat_renderer.RequestError as error:
            return error.message

    late = "the chat template takes too long or too much memory"
    try:
        assert [outcome("y"), outcome("y"), outcome("x")] == [late, late, "x"]
        assert [outcome("y") for _ in range(4)] == [late] * 3 + [outcome("x")]
        assert "too often" in outcome("x")
    finally:
        renderer.close()


def test_a_process_that_dies_is_replaced(stack: Stack) -> None:
    helpers = stack.manager.text._renderer._all  # type: ignore[union-attr]
    assert chat(stack, "hello").status_code == 200
    for helper in helpers:
        if helper.process is not None:
            os.kill(helper.process.pid, signal.SIGKILL)
    codes = [chat(stack, "hello").status_code for _ in range(4)]
    assert codes.count(200) >= 2 and codes[-1] == 200
    stack.check_idle()


def test_text_and_options_arrive_as_they_are(tmp_path: Path) -> None:
    source = "{{ messages[0].content }}|{{ enable_thinking }}|{{ big }}|{{ add_generation_prompt }}"
    renderer = chat_renderer.ChatRenderer(chat_renderer.ChatTemplate(source, {"bos_token": "<s>"}))
    options: dict[str, Any] = {"enable_thinking": False, "big": 10**30}
    try:
        text = "\x00 é 中 \U0001f600 \u2028 {{ 7 }}"
        rendered = renderer.render([{"role": "user", "content": text}], options)
        assert rendered == f"{text}|False|{10**30}|True"
    finally:
        renderer.close()


# The forks that render ---------------------------------------------------------------------

BAD = """{%- if messages[0].content == 'eat' %}{{ '%1000000000d' % messages|length }}
{%- elif messages[0].content == 'loop' %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- else %}{{ messages[0].content }}{% endif %}"""


@pytest.fixture
def renderer() -> Iterator[chat_renderer.ChatRenderer]:
    renderer = chat_renderer.ChatRenderer(chat_renderer.ChatTemplate(BAD, {}))
    yield renderer
    forks = [fork for helper in renderer._all for fork in forks_of(helper)]
    renderer.close()
    assert not psutil.wait_procs(forks, timeout=10)[1]


def forks_of(helper: HelperProcess) -> list[psutil.Process]:
    if helper.process is None:
        return []
    return list(psutil.Process(helper.process.pid).children())


def said(renderer: chat_renderer.ChatRenderer, text: str) -> str:
    """What is rendered, or the code of the error."""
    try:
        return renderer.render([{"role": "user", "content": text}], {})
    except chat_renderer.RequestError as error:
        return str(error.code)


def test_a_bound_costs_a_fork_and_no_process(
    renderer: chat_renderer.ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_renderer, "SECONDS", 0.3)
    assert [said(renderer, "x"), said(renderer, "y")] == ["x", "y"]  # each process has had one
    processes = [helper.process for helper in renderer._all]
    for bad in ("eat", "loop", "eat", "eat", "loop"):
        assert said(renderer, bad) == "template_failed"
        assert said(renderer, bad + "!") == bad + "!"
    assert [helper.process for helper in renderer._all] == processes
    assert all(process is not None and process.poll() is None for process in processes)


def test_a_fork_that_dies_or_stands_still_is_replaced(
    renderer: chat_renderer.ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have written a part of an answer: its process ends with it."""
    monkeypatch.setattr(chat_renderer, "SECONDS", 0.3)
    monkeypatch.setattr(chat_renderer, "_GRACE", 0.3)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        assert [said(renderer, "x"), said(renderer, "y")] == ["x", "y"]
        forks = [fork for helper in renderer._all for fork in forks_of(helper)]
        assert len(forks) == 2
        for fork in forks:
            fork.send_signal(number)
        assert [said(renderer, "x"), said(renderer, "y")] == ["template_failed"] * 2
        assert not psutil.wait_procs(forks, timeout=10)[1]
    assert said(renderer, "x") == "x"


def test_a_fork_at_work_ends_with_its_process(renderer: chat_renderer.ChatRenderer) -> None:
    thread, answers = in_background(lambda: said(renderer, "loop"))
    deadline = time.monotonic() + 10
    forks: list[psutil.Process] = []
    while not any(fork.cpu_times().user > 0.2 for fork in forks):
        assert time.monotonic() < deadline
        time.sleep(0.01)
        forks = [fork for helper in renderer._all for fork in forks_of(helper)]
    for helper in renderer._all:
        if helper.process is not None:
            helper.process.kill()
    thread.join(10)
    assert answers == ["template_failed"]
    assert not psutil.wait_procs(forks, timeout=10)[1]
