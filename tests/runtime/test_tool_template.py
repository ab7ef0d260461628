"""A model's second template, for conversations with tools: which variables it may be told."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from radix_runtime.config import ServerArgs
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.offline_chat import ChatBuilder
from radix_runtime.server.chat_renderer import ChatRenderer
from radix_runtime.text.answer_format import find_format
from radix_runtime.text.tokenizer import Tokenizer, load_tokenizer
from tests.runtime.scripted_server import MODEL, ScriptedServer
from tests.runtime.tool_templates import HERMES

PATHS = ("/v1/tokenize", "/v1/chat/completions")
SUM: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
TOOLS = [{"type": "function", "function": {"name": "get_time"}}]
THINKING = {"enable_thinking": True}
EFFORT = {"reasoning_effort": "low"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The default template knows `enable_thinking`, the other one `reasoning_effort`."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_DIR / name, folder)
    (folder / "chat_template.jinja").write_text("D {{ enable_thinking }} {{ messages[0].content }}")
    second = folder / "additional_chat_templates" / "tool_use.jinja"
    second.parent.mkdir()
    second.write_text("{# " + HERMES.replace("#", "") + " #}T {{ reasoning_effort }} {{ tools }}")
    return load_tokenizer(folder)


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    made.tokenizer = tokenizer
    with made:
        yield made


@pytest.mark.parametrize(
    ("options", "tools", "begins"),
    [
        (THINKING, None, "D True"),
        (THINKING, TOOLS, None),
        (EFFORT, TOOLS, "T low"),
        (EFFORT, None, None),
    ],
)
def test_a_variable_of_the_other_template_is_refused(
    server: ScriptedServer, options: dict[str, Any], tools: Any, begins: str | None
) -> None:
    body = {"model": MODEL, "messages": SUM, "chat_template_kwargs": options, "tools": tools}
    server.answers.append("42")
    responses = [httpx.post(server.url + path, json=body) for path in PATHS]
    builder = ChatBuilder(server.tokenizer, find_format(ServerArgs(), server.tokenizer))
    same: Any = {"tools": tools, "tool_choice": None, "parallel_tool_calls": None}
    same["continues"] = False
    if begins is not None:
        assert [response.status_code for response in responses] == [200, 200]
        assert server.prompts[-1].startswith(begins)
        (prompt,) = builder.chat(SUM, options, **same).prompts
        assert server.tokenizer.decode(prompt.ids) == server.prompts[-1]
        return
    (name,) = options
    for response in responses:
        error = response.json()["error"]
        param = f"chat_template_kwargs.{name}"
        assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    with pytest.raises(ValueError, match=f"chat template has no {name}"):
        builder.chat(SUM, options, **same)


def test_the_processes_have_both_templates(tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template
    assert template is not None
    renderer = ChatRenderer(template)
    try:
        assert renderer.render(SUM, THINKING) == "D True What is 17 + 25?"
        with_tools = renderer.render(SUM, {**EFFORT, "tools": TOOLS})
        assert with_tools.startswith("T low") and "get_time" in with_tools
    finally:
        renderer.close()
