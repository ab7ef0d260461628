"""What /v1/responses is given, as a conversation: items, instructions and tools."""

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import RequestError, refusal
from ..text.conversation import CalledFunction, ChatMessage, MessageCall
from ..text.field_names import FieldNames
from ..text.tools import FunctionSpec, ToolSpec, tool_use
from .chat_request import Conversation
from .protocol import RESPONSES_NAMES, ResponsesBody

NAMES = FieldNames(
    messages="input",
    tool_name="name",
    tool_parameters="parameters",
    call_id="call_id",
    effort="reasoning.effort",
    sampling=RESPONSES_NAMES,
)
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def read_responses(body: ResponsesBody) -> Conversation:
    """The conversation of a body. Raises RequestError."""
    use = tool_use(
        [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])],
        body.tool_choice,
        parallel=body.parallel_tool_calls,
        names=NAMES,
    )
    messages: list[ChatMessage] = []
    places = []
    if body.instructions:
        messages.append(ChatMessage(role="system", content=body.instructions))
        places.append("instructions")
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
        places.append("input")
    else:
        for i, item in enumerate(body.input):
            _add_item(messages, item, f"input[{i}]")
            if len(messages) > len(places):  # an item may go into the message before
                places.append(f"input[{i}]")
    return Conversation(messages=messages, tools=use, places=places)


def _tool(tool: Mapping[str, Any], where: str) -> ToolSpec:
    if tool.get("type") != "function":
        message = f"{where}: only tools of type function are supported"
        raise refusal("unsupported_parameter", message, f"{where}.type")
    fields = {name: value for name, value in tool.items() if name != "type" and value is not None}
    try:
        return ToolSpec(type="function", function=msgspec.convert(fields, FunctionSpec))
    except msgspec.ValidationError as error:
        raise refusal("invalid_tool", f"{where}: {error}"[:200], where) from None


def _add_item(messages: list[ChatMessage], item: Mapping[str, Any], where: str) -> None:
    """Adds an item. What the assistant did between two inputs is one message."""
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, item, where)
    elif kind == "function_call":
        function = CalledFunction(
            name=_string(item, "name", where), arguments=_string(item, "arguments", where)
        )
        answer = _assistant(messages)
        call = MessageCall(id=_string(item, "call_id", where), function=function)
        answer.tool_calls = [*(answer.tool_calls or []), call]
    elif kind == "function_call_output":
        text = _text(item.get("output"), f"{where}.output")
        call_id = _string(item, "call_id", where)
        messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=text))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        answer = _assistant(messages)
        answer.reasoning_content = _text(parts, f"{where}.content")
    else:
        message = f"{where}: items of this type are not supported"
        raise refusal("unsupported_parameter", message, f"{where}.type")


def _add_message(messages: list[ChatMessage], item: Mapping[str, Any], where: str) -> None:
    role = _string(item, "role", where)
    if role not in _ROLES:
        message = f"{where}.role: must be one of {', '.join(_ROLES)}"
        raise refusal("invalid_value", message, f"{where}.role")
    text = _text(item.get("content"), f"{where}.content")
    if role != "assistant":
        messages.append(ChatMessage(role=role, content=text))
        return
    answer = _assistant(messages)
    answer.content = text if answer.content is None else f"{answer.content}{text}"


def _assistant(messages: list[ChatMessage]) -> ChatMessage:
    """The assistant's message at the end, which is added if there is none."""
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant"))
    return messages[-1]


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if value is None:
        raise refusal("missing_field", f"{where}.{name} is required", f"{where}.{name}")
    if not isinstance(value, str):
        raise _not_a_text(f"{where}.{name}")
    return value


def _text(content: Any, where: str) -> str:
    """The text of a string or of parts that are texts."""
    if isinstance(content, str):
        return content
    if content is None:
        raise refusal("missing_field", f"{where} is required", where)
    if not isinstance(content, list):
        raise _not_a_text(where)
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS:
            message = f"{where}[{i}]: only text is supported"
            raise refusal("unsupported_parameter", message, f"{where}[{i}].type")
        if not isinstance(part.get("text"), str):
            raise _not_a_text(f"{where}[{i}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _not_a_text(where: str) -> RequestError:
    return refusal("invalid_type", f"{where}: must be a text", where)
