"""Chat templates that loop or allocate: they cost their own request, and nobody else anything."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from radix_runtime.server import chat_renderer
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
