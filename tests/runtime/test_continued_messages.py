"""Answers that continue the last message: of the chat, of /v1/messages, /tokenize and Engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from radix_runtime.errors import RequestError
from radix_runtime.text.answer_format import AnswerFormat, Choice
from radix_runtime.text.chat_template import ChatTemplate
from tests.runtime.agent_rig import calling, serve
from tests.runtime.parity import engine
from tests.runtime.scripted_server import MODEL, ScriptedServer
from tests.runtime.test_tool_calls import CHAT, TIME, USER, WEATHER, call_text, streamed
from tests.runtime.tool_templates import TEMPLATES

FINAL: dict[str, Any] = {"role": "assistant", "content": "The answer "}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with serve(tmp_path_factory.mktemp("template"), api_key=None) as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[httpx.Client]:
    with calling(server) as client:
        yield client


def body(final: dict[str, Any] = FINAL, **fields: Any) -> dict[str, Any]:
    given = {"model": MODEL, "messages": [USER, final], "continue_final_message": True}
    return {**given, **fields}


TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}[end]{% endfor %}"
CONTENTS = ["Paris", " Paris is ", "a\n\n", "<think>\nHm", "x<|im_end|>"]


@pytest.mark.parametrize("name", [*sorted(TEMPLATES.keys() - {"gpt-oss"}), "trims"])
@pytest.mark.parametrize("content", CONTENTS)
def test_the_prompt_is_that_of_transformers(name: str, content: str) -> None:
    source = TEMPLATES.get(name, TRIMS)
    messages = [USER, {"role": "assistant", "content": content}]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(source, special).render(messages, continue_final_message=True)
    theirs, _ = render_jinja_template(
        [messages], chat_template=source, continue_final_message=True, **special
    )
    assert ours == theirs[0] and ours.rstrip().endswith(content.strip())


def test_a_template_that_does_not_write_it() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content | reverse }}{% endfor %}", {})
    with pytest.raises(RequestError, match="does not write the final message"):
        template.render([USER, FINAL], continue_final_message=True)


def test_channels_have_no_middle() -> None:
    channels = AnswerFormat(
        tools=Choice("none", "test"), reasoning=Choice("gpt-oss", "test"), tokenizer=None
    )
    with pytest.raises(RequestError, match="gpt-oss cannot be continued"):
        channels.require_continuing()


def test_the_answer_is_what_is_added(server: ScriptedServer, client: httpx.Client) -> None:
    server.answers += ["is 42."] * 3
    whole = client.post(CHAT, json=body(add_generation_prompt=False)).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("is 42.", "stop")
    assert server.prompts[-1].endswith("<|im_start|>assistant\nThe answer ")
    message, _ = streamed(client, **body(tools=None))
    assert message["content"] == "is 42."
    parts = [{"type": "text", "text": FINAL["content"]}]
    client.post(CHAT, json=body({**FINAL, "content": parts})).raise_for_status()
    assert len(set(server.prompts[-3:])) == 1


@pytest.mark.parametrize(
    ("content", "answer", "reasoning", "added"),
    [
        ("<think>\nHm, ", "so.\n</think>\n\n42.", "so.", "42."),
        ("<think>\nFirst.", "\nSecond.\n</think>\n\n42.", "\nSecond.", "42."),
        ("<think>\nHm\n</thi", "nk>\n\n42.", None, "42."),
        ("<think>\nHm\n</think>", "\n\n42.", None, "42."),
        ("<think>\nHm\n</think>\n\nIt", " is 42.", None, " is 42."),
        ("Use the <think> tag to ", "begin a thought.", None, "begin a thought."),
        ("<think>\nHm\n</think>\n\nThe tag <think> ", "begins one.", None, "begins one."),
    ],
)
def test_reasoning_goes_on_where_it_was(
    server: ScriptedServer,
    client: httpx.Client,
    content: str,
    answer: str,
    reasoning: str | None,
    added: str,
) -> None:
    server.answers += [answer] * 2
    given = body({**FINAL, "content": content})
    message = client.post(CHAT, json=given).json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, added)
    parts, _ = streamed(client, **given, tools=None)
    assert (parts.get("reasoning_content"), parts["content"]) == (reasoning, added)


def test_a_format_waits_for_the_end_of_reasoning(
    server: ScriptedServer, client: httpx.Client
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    for content, waits in (("<think>\nHm", True), ("The <think> tag ", False)):
        server.answers.append("5")
        given = body({**FINAL, "content": content}, response_format=form)
        client.post(CHAT, json=given).raise_for_status()
        constraint = server.requests[-1].constraint
        assert constraint is not None and ("</think>" in constraint.before) == waits


def test_a_call_may_follow(server: ScriptedServer, client: httpx.Client) -> None:
    server.answers.append("\n" + call_text("Paris"))
    answer = client.post(CHAT, json=body(tools=[WEATHER, TIME])).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    function = answer["message"]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"city": "Paris"}


CALL = {"id": "c", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": [USER]}, "invalid_value", "messages"),
        ({"messages": [USER, {**FINAL, "content": ""}]}, "invalid_value", "messages"),
        (
            {"messages": [USER, {**FINAL, "content": [{"type": "text", "text": ""}]}]},
            "invalid_value",
            "messages",
        ),
        ({"messages": [USER, {**FINAL, "tool_calls": [CALL]}]}, "invalid_value", "messages"),
        ({"continue_final_message": False}, "invalid_value", "messages"),
        ({"add_generation_prompt": True}, "invalid_combination", "add_generation_prompt"),
        (
            {"add_generation_prompt": False, "continue_final_message": None},
            "unsupported_parameter",
            "add_generation_prompt",
        ),
    ],
)
def test_what_cannot_be_continued(
    client: httpx.Client, fields: dict[str, Any], code: str, param: str
) -> None:
    response = client.post(CHAT, json=body(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)


def test_messages_of_anthropic(server: ScriptedServer, client: httpx.Client) -> None:
    server.answers.append("is 42.")
    given = {"model": MODEL, "max_tokens": 9, "messages": [USER, FINAL]}
    answer = client.post("/v1/messages", json=given).json()
    assert [block["text"] for block in answer["content"]] == ["is 42."]
    assert server.prompts[-1].endswith("The answer ")
    del given["max_tokens"]
    counted = client.post("/v1/messages/count_tokens", json=given).json()["input_tokens"]
    fields = {"messages": [USER, FINAL], "continue_final_message": True}
    tokens = client.post("/tokenize", json=fields).json()
    assert counted == answer["usage"]["input_tokens"] == tokens["count"]
    both = client.post("/tokenize", json={**fields, "add_generation_prompt": True})
    assert both.json()["error"]["code"] == "invalid_combination"
    prompt = client.post("/tokenize", json={"prompt": "a", "continue_final_message": True})
    assert prompt.json()["error"]["param"] == "continue_final_message"
    empty = {**given, "max_tokens": 9, "messages": [USER, FINAL, {"role": "user", "content": []}]}
    assert client.post("/v1/messages", json=empty).status_code == 400


def test_the_engine() -> None:
    with engine(None) as e:
        user = {"role": "user", "content": "What is 17 + 25?"}
        params = {"temperature": 0, "max_new_tokens": 24}
        whole = e.chat([user], params)["message"]["content"]
        begun = {"role": "assistant", "content": whole[: len(whole) // 2]}
        rest = e.chat([user, begun], params, continue_final_message=True)
        assert begun["content"] + rest["message"]["content"] == whole
        with pytest.raises(ValueError, match="unless continue_final_message is set"):
            e.chat([user, begun], params)
        with pytest.raises(ValueError, match="is True or False"):
            e.chat([user, begun], params, continue_final_message="no")
        with pytest.raises(ValueError, match="has no add_generation_prompt"):
            e.chat([user], params, chat_template_kwargs={"add_generation_prompt": False})
        with pytest.raises(ValueError, match="a dict, not int"):
            e.chat([user], 5)
        with pytest.raises(ValueError, match="a message of the assistant"):
            e.chat([user], params, continue_final_message=True)
