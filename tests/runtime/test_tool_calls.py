"""Tools and reasoning over HTTP: what is refused, what the model is told, what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.agent_rig import calling
from tests.runtime.scripted_server import MODEL, ScriptedServer
from tests.runtime.tool_templates import HERMES

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Weather?"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}


def call_text(city: str) -> str:
    arguments = json.dumps({"city": city})
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'


ANSWER = (
    "<think>\nHm, Paris.\n</think>\n\nI look.\n" + call_text("Paris") + "\n" + call_text("Rome")
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("template") / "hermes.jinja"
    file.write_text(HERMES)
    return str(file)


@pytest.fixture(scope="module")
def server(template: str) -> Iterator[ScriptedServer]:
    with ScriptedServer(chat_template=template) as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[httpx.Client]:
    with calling(server) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], "tools": [WEATHER, TIME], **fields}


def streamed(client: httpx.Client, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message that the deltas of a stream make, and the chunks."""
    response = client.post(CHAT, json=body(stream=True, **fields))
    assert response.status_code == 200, response.text
    frames = [line[6:] for line in response.text.split("\n\n") if line]
    assert frames.pop() == "[DONE]"
    chunks = [json.loads(frame) for frame in frames]
    message: dict[str, Any] = {"role": "", "content": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    _extend_calls(message.setdefault(name, []), value)
                else:
                    message[name] = message.get(name, "") + value
    return message, chunks


def _extend_calls(calls: list[Any], deltas: list[Any]) -> None:
    for delta in deltas:
        if delta["index"] == len(calls):
            assert delta["type"] == "function" and delta["function"]["arguments"] == ""
            calls.append({k: v for k, v in delta.items() if k != "index"})
        else:
            assert delta["index"] == len(calls) - 1 and set(delta) == {"index", "function"}
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


def test_reasoning_content_and_calls(server: ScriptedServer, client: httpx.Client) -> None:
    server.answers.append(ANSWER)
    answer = client.post(CHAT, json=body()).json()
    choice = answer["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == "Hm, Paris."
    assert message["content"] == "I look."
    names = [call["function"]["name"] for call in message["tool_calls"]]
    cities = [json.loads(call["function"]["arguments"])["city"] for call in message["tool_calls"]]
    assert (names, cities) == (["get_weather"] * 2, ["Paris", "Rome"])
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(i.startswith("call_") for i in ids)
    assert '"name": "get_weather"' in server.prompts[-1] and "get_time" in server.prompts[-1]


def test_the_stream_is_the_whole(server: ScriptedServer, client: httpx.Client) -> None:
    server.answers += [ANSWER, ANSWER]
    whole = client.post(CHAT, json=body()).json()
    message, chunks = streamed(client, stream_options={"include_usage": True})
    for call in [*message["tool_calls"], *whole["choices"][0]["message"]["tool_calls"]]:
        del call["id"]
    assert message == whole["choices"][0]["message"]
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert set(reasons[:-1]) == {None} and reasons[-1] == "tool_calls"
    assert chunks[-1]["usage"] == whole["usage"]


def test_reasoning_tokens(server: ScriptedServer, client: httpx.Client) -> None:
    """The tokens up to the end of the reasoning, whether they come one by one or at once."""
    thought = "<think>\nHm, Paris.\n</think>"
    server.answers += [f"{thought}\n\nHello there.", "No thought.", "<think>\ncut"]
    counts = []
    for _ in range(3):
        usage = client.post(CHAT, json=body()).json()["usage"]
        counts.append(usage["completion_tokens_details"]["reasoning_tokens"])
    expected = len(server.tokenizer.encode(thought, False))
    # The newlines behind the end may be one token with its last character.
    assert counts[0] in (expected, expected + 1)
    assert counts[1:] == [0, len(server.tokenizer.encode("<think>\ncut", False))]


@pytest.mark.parametrize("tokens", [1, 7, 10_000])
def test_pieces_of_any_size(template: str, tokens: int) -> None:
    with (
        ScriptedServer(chat_template=template, tokens=tokens) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        server.answers += [ANSWER, ANSWER]
        message, _ = streamed(client)
        assert message["content"] == "I look." and message["reasoning_content"] == "Hm, Paris."
        assert len(message["tool_calls"]) == 2
        usage = client.post(CHAT, json=body()).json()["usage"]
        tokens_of = len(server.tokenizer.encode("<think>\nHm, Paris.\n</think>", False))
        counted = usage["completion_tokens_details"]["reasoning_tokens"]
        assert counted in (tokens_of, tokens_of + 1)


def test_choices_are_parsed_apart(server: ScriptedServer, client: httpx.Client) -> None:
    server.answers += ["plain", ANSWER, call_text("Oslo")]
    choices = client.post(CHAT, json=body(n=3)).json()["choices"]
    assert [c["finish_reason"] for c in choices] == ["stop", "tool_calls", "tool_calls"]
    assert choices[0]["message"] == {"role": "assistant", "content": "plain"}
    assert choices[2]["message"]["content"] is None


def test_one_call_at_a_time(server: ScriptedServer, client: httpx.Client) -> None:
    server.answers += [ANSWER, ANSWER]
    whole = client.post(CHAT, json=body(parallel_tool_calls=False)).json()
    message, _ = streamed(client, parallel_tool_calls=False)
    for calls in (whole["choices"][0]["message"]["tool_calls"], message["tool_calls"]):
        assert len(calls) == 1 and "Paris" in calls[0]["function"]["arguments"]


def test_a_call_that_was_cut_by_length(server: ScriptedServer, client: httpx.Client) -> None:
    text = call_text("Paris")
    server.answers.append(text)
    tokens = len(server.tokenizer.encode(text, False))
    choice = client.post(CHAT, json=body(max_tokens=tokens - 12)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert '{"city": "Paris"}'.startswith(arguments)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_markup_of_a_forced_call_that_was_cut_is_no_content(
    server: ScriptedServer, client: httpx.Client, choice: str
) -> None:
    text = call_text("Paris") + "\n" + call_text("Rome")
    ids = server.tokenizer.encode(text, False)
    shown = set()
    for tokens in range(1, len(ids)):
        server.answers += [text] * 2
        fields = {"max_tokens": tokens, "tool_choice": choice}
        answer = client.post(CHAT, json=body(**fields)).json()["choices"][0]
        message, _ = streamed(client, **fields)
        assert answer["finish_reason"] == "length"
        assert (answer["message"]["content"] or "") == message["content"]
        shown.add(message["content"].strip())
    assert (shown == {""}) == (choice == "required")


def test_a_stop_string_in_arguments_leaves_no_call_to_make(
    server: ScriptedServer, client: httpx.Client
) -> None:
    server.answers += [call_text("Paris")] * 2
    for stop, reason in (("Paris", "stop"), ("\n</tool_call", "tool_calls")):
        choice = client.post(CHAT, json=body(stop=stop)).json()["choices"][0]
        assert (choice["finish_reason"], choice["matched_stop"]) == (reason, stop)
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_none_and_no_tools_leave_the_text(server: ScriptedServer, client: httpx.Client) -> None:
    """With tool_choice none the model is told of no tools and nothing is taken for a call."""
    server.answers += [call_text("Paris")] * 2
    for fields in ({"tool_choice": "none"}, {"tools": None}):
        message = client.post(CHAT, json=body(**fields)).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": call_text("Paris")}
        assert "get_weather" not in server.prompts[-1]


def test_allowed_tools(server: ScriptedServer, client: httpx.Client) -> None:
    server.answers.append("ok")
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert client.post(CHAT, json=body(tool_choice=choice)).status_code == 200
    assert "get_time" in server.prompts[-1] and "get_weather" not in server.prompts[-1]


def test_reasoning_may_stay_or_be_left_out(server: ScriptedServer, client: httpx.Client) -> None:
    text = "<think>\na\n</think>\n\nb"
    server.answers += [text] * 2
    kept = client.post(CHAT, json=body(separate_reasoning=False)).json()["choices"][0]["message"]
    assert kept == {"role": "assistant", "content": text}
    hidden = client.post(CHAT, json=body(include_reasoning=False)).json()["choices"][0]["message"]
    assert hidden == {"role": "assistant", "content": "b"}


def test_a_model_reasons_where_its_reasoning_stays(
    server: ScriptedServer, client: httpx.Client
) -> None:
    """A schema begins where the reasoning ends, whoever takes it out."""
    constraints = []
    for separate in (True, False):
        server.answers.append("<think>\na\n</think>\n\n7")
        fields = body(separate_reasoning=separate, json_schema={"type": "integer"}, tools=None)
        assert client.post(CHAT, json=fields).status_code == 200
        constraints.append(server.requests[-1].constraint)
    assert constraints[0] == constraints[1] and "<think>" in constraints[0].before


def test_thinking_off(server: ScriptedServer, client: httpx.Client) -> None:
    """The prompt closes the reasoning: what follows is content, whatever it looks like."""
    server.answers.append("<think> is a tag")
    fields = body(chat_template_kwargs={"enable_thinking": False})
    message = client.post(CHAT, json=fields).json()["choices"][0]["message"]
    assert message["content"] == "<think> is a tag"
    assert server.prompts[-1].rstrip().endswith("</think>")


def test_the_name_of_the_reasoning_field(template: str) -> None:
    with (
        ScriptedServer(chat_template=template, reasoning_field="reasoning") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        server.answers += [ANSWER] * 2
        message = client.post(CHAT, json=body()).json()["choices"][0]["message"]
        assert message["reasoning"] == "Hm, Paris." and "reasoning_content" not in message
        assert streamed(client)[0]["reasoning"] == "Hm, Paris."


def test_history_with_calls(server: ScriptedServer, client: httpx.Client) -> None:
    """An answer may be sent back as it came; the model sees what it wrote."""
    server.answers += [ANSWER, "It is sunny."]
    message = client.post(CHAT, json=body()).json()["choices"][0]["message"]
    first, second = message["tool_calls"]
    messages = [
        USER,
        message,
        {"role": "tool", "tool_call_id": first["id"], "content": "sunny"},
        {
            "role": "tool",
            "tool_call_id": second["id"],
            "content": [{"type": "text", "text": "hot"}],
        },
    ]
    answer = client.post(CHAT, json=body(messages=messages)).json()
    assert answer["choices"][0]["message"]["content"] == "It is sunny."
    prompt = server.prompts[-1]
    assert ANSWER in prompt
    assert "<tool_response>\nsunny" in prompt and "<tool_response>\nhot" in prompt
    tokens = client.post("/tokenize", json={"messages": messages, "tools": [WEATHER, TIME]}).json()
    assert server.tokenizer.decode(tokens["tokens"], False) == prompt


def test_arguments_that_are_no_json_stay_text(server: ScriptedServer, client: httpx.Client) -> None:
    server.answers.append("ok")
    function = {"name": "get_weather", "arguments": '{"city": "Par'}
    call = {"id": "c", "type": "function", "function": function}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "no"},
    ]
    assert client.post(CHAT, json=body(messages=messages)).status_code == 200
    assert json.dumps('{"city": "Par') in server.prompts[-1]


def test_a_template_without_tools_is_named() -> None:
    with ScriptedServer() as server, httpx.Client(base_url=server.url) as client:
        error = client.post(CHAT, json=body()).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "tools")
        assert f"the chat template of {MODEL} takes no tools" in error["message"]


def test_without_a_parser_tools_are_refused(template: str) -> None:
    with (
        ScriptedServer(chat_template=template, tool_call_parser="none") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        error = client.post(CHAT, json=body()).json()["error"]
        assert error["code"] == "unsupported_parameter" and "--tool-call-parser" in error["message"]


def test_special_tokens_of_the_format_reach_the_parser(
    server: ScriptedServer, client: httpx.Client, tmp_path: Path
) -> None:
    """A format of special tokens: they are markup of the answer, and hidden otherwise."""
    end = server.tokenizer.id_to_text(server.tokenizer.eos_token_id or 0)
    server.answers += [f"a{end}b"] * 2
    kept = client.post(CHAT, json=body(keep_special=[server.tokenizer.eos_token_id])).json()
    hidden = client.post(CHAT, json=body()).json()
    assert kept["choices"][0]["message"]["content"] == f"a{end}b"
    assert hidden["choices"][0]["message"]["content"] == "ab"
