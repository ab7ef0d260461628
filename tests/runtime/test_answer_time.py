"""Answers that are long or hostile to a parser do not hold the event loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.runtime.loop_monitor import LoopHeld
from tests.runtime.scripted_server import MODEL, ScriptedServer
from tests.runtime.test_tool_calls import CHAT, TIME, USER, WEATHER, call_text
from tests.runtime.tool_templates import HERMES

TEXTS = {
    "a call with long arguments": call_text("Paris " * 20_000),
    "many calls": call_text("Paris") * 500,
    "what begins a call": '<tool_call>{"name": "' * 5_000,
    "an answer behind reasoning": "<think>\nso\n</think>\n\n" + "so " * 30_000,
    "reasoning": "<think>\n" + "so " * 30_000 + "</think>\n\nHi",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    file = tmp_path_factory.mktemp("template") / "hermes.jinja"
    file.write_text(HERMES)
    # All of an answer comes in one message.
    with ScriptedServer(chat_template=str(file), tokens=1 << 20, monitored=True) as server:
        server.answers += ["warm"] * 2
        for _ in range(2):
            httpx.post(server.url + CHAT, json=_body()).raise_for_status()
        yield server


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], "tools": [WEATHER, TIME], **fields}


def three_times(test: Callable[..., None]) -> Callable[..., None]:
    """Fails if the loop was held in each of three runs: see test_loop_time.py."""

    @functools.wraps(test)
    def run(server: ScriptedServer, **fixtures: Any) -> None:
        for left in (2, 1, 0):
            try:
                return test(server, **fixtures)
            except LoopHeld:
                if left == 0:
                    raise

    return run


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", TEXTS)
@three_times
def test_no_answer_holds_the_loop(server: ScriptedServer, name: str, stream: bool) -> None:
    text = TEXTS[name]
    server.monitor.reset()
    server.answers.append(text)
    for path in (CHAT, "/v1/messages"):
        if path != CHAT:
            server.answers.append(text)
        fields: dict[str, Any] = {"stream": stream}
        if path != CHAT:
            function = WEATHER["function"]
            tool = {"name": function["name"], "input_schema": function["parameters"]}
            fields |= {"max_tokens": 60_000, "tools": [tool]}
        response = httpx.post(server.url + path, json=_body(**fields), timeout=60)
        assert response.status_code == 200, response.text[:300]
    server.monitor.check()
