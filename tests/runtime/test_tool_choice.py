"""Tools over HTTP: what is refused, and what forces the model to call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.runtime.agent_rig import calling, serve
from tests.runtime.scripted_server import ScriptedServer
from tests.runtime.test_tool_calls import CHAT, USER, WEATHER, body, call_text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with serve(tmp_path_factory.mktemp("template"), api_key=None) as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[httpx.Client]:
    with calling(server) as client:
        yield client


def _tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_ASSISTANT = {"role": "assistant", "tool_calls": [_CALL]}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": [_tool(f"f{i}") for i in range(129)]}, "invalid_tool", "tools"),
        ({"tools": [_tool(), _tool()]}, "invalid_tool", "tools[1].function.name"),
        ({"tools": [_tool("a b")]}, "invalid_tool", "tools[0].function.name"),
        ({"tools": [_tool("")]}, "invalid_tool", "tools[0].function.name"),
        ({"tools": [_tool("x" * 65)]}, "invalid_tool", "tools[0].function.name"),
        (
            {"tools": [_tool(parameters={"type": "string"})]},
            "invalid_tool",
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [_tool(parameters={"properties": []})]},
            "invalid_tool",
            "tools[0].function.parameters.properties",
        ),
        (
            {"tools": [_tool(parameters={"required": "a"})]},
            "invalid_tool",
            "tools[0].function.parameters.required",
        ),
        ({"tools": [_tool(parameters=[])]}, "invalid_type", "tools[0].function.parameters"),
        ({"tools": [{"type": "function"}]}, "missing_field", "tools[0].function"),
        ({"tools": [{**_tool(), "type": "retrieval"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [_tool(nme="x")]}, "unknown_parameter", "tools[0].function.nme"),
        ({"tool_choice": "maybe"}, "invalid_tool", "tool_choice"),
        ({"tool_choice": _named("other")}, "invalid_tool", "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "invalid_tool", "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "invalid_tool", "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "invalid_tool", "tool_choice"),
        ({"tools": [], "tool_choice": _named("f")}, "invalid_tool", "tool_choice"),
        ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
        ({"function_call": "auto"}, "unsupported_parameter", "function_call"),
        (
            {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "zzz"}]},
            "invalid_value",
            "messages[1].tool_call_id",
        ),
        (
            {"messages": [USER, _ASSISTANT, {"role": "tool", "content": "x"}]},
            "missing_field",
            "messages[2].tool_call_id",
        ),
        (
            {"messages": [USER, {**USER, "tool_calls": [_CALL]}]},
            "invalid_value",
            "messages[1].tool_calls",
        ),
        (
            {"messages": [USER, {**USER, "tool_call_id": "c"}]},
            "invalid_value",
            "messages[1].tool_call_id",
        ),
        (
            {"messages": [USER, {**_ASSISTANT, "tool_calls": [{**_CALL, "type": "custom"}]}, USER]},
            "unsupported_parameter",
            "messages[1].tool_calls[0].type",
        ),
        (
            {"messages": [USER, {**_ASSISTANT, "tool_calls": [{"id": "c"}]}, USER]},
            "missing_field",
            "messages[1].tool_calls[0].function",
        ),
    ],
)
def test_bad_tools(client: httpx.Client, fields: Any, code: str, param: str) -> None:
    response = client.post(CHAT, json=body(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)


# Calls that are forced ------------------------------------------------------------------------


def constraint_of(server: ScriptedServer, client: httpx.Client, **fields: Any) -> Any:
    """The constraint of a request with these fields."""
    server.answers.append(call_text("Paris"))
    response = client.post(CHAT, json=body(**fields))
    assert response.status_code == 200, response.text
    return server.requests[-1].constraint


def test_what_forces_a_call(server: ScriptedServer, client: httpx.Client) -> None:
    assert constraint_of(server, client) is None
    required = constraint_of(server, client, tool_choice="required")
    assert (
        required.kind == "lark" and "get_weather" in required.text and "get_time" in required.text
    )
    one = constraint_of(server, client, tool_choice=_named("get_time"))
    assert "get_time" in one.text and "get_weather" not in one.text
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    free = constraint_of(server, client, tools=[strict])
    assert "ANY_TEXT" in free.text and free.text != required.text


def test_a_format_begins_behind_the_reasoning(server: ScriptedServer, client: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    thinking = constraint_of(server, client, tools=None, response_format=form)
    assert thinking.kind == "json_schema" and "</think>" in thinking.before
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert constraint_of(server, client, tools=None, response_format=form, **off).before == ""
    both = constraint_of(server, client, response_format=form)
    assert both.kind == "lark" and "integer" in both.text and "get_weather" in both.text


@pytest.mark.parametrize("choice", ["auto", "required", _named("get_time")])
@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("regex", "[a-z]+", "regex"),
        ("ebnf", 'root ::= "a"', "ebnf"),
        ("structured_outputs", {"choice": ["x", "y"]}, "structured_outputs.choice"),
        ("ignore_eos", True, "ignore_eos"),
    ],
)
def test_what_cannot_go_with_calls(
    server: ScriptedServer,
    client: httpx.Client,
    choice: Any,
    field: str,
    value: Any,
    param: str,
) -> None:
    if (choice, field) == ("auto", "ignore_eos"):  # nothing is forced, so it may run on
        assert constraint_of(server, client, ignore_eos=True) is None
        return
    error = client.post(CHAT, json=body(tool_choice=choice, **{field: value})).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_combination", param)


def test_parameters_that_cannot_be_kept(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "http://x/y"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    error = client.post(CHAT, json=body(tools=[tool], tool_choice="required")).json()["error"]
    assert error["type"] == "invalid_request_error" and "schema" in error["code"]
