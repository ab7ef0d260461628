"""Messages of a conversation: as clients give them, and as chat templates take them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from ..errors import refusal
from .field_names import CHAT_NAMES, FieldNames

ROLES = ("system", "developer", "user", "assistant", "tool")


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message's content."""

    type: str
    text: str


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The function of a call; `arguments` is a JSON text."""

    name: str
    arguments: str = ""


class MessageCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A call that the assistant has made."""

    nested: ClassVar[Mapping[str, type]] = {"function": CalledFunction}
    id: str
    type: str = "function"
    function: CalledFunction
    index: int | None = None  # as the deltas of a stream have it


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of a conversation; parts of its content are TextPart. `reasoning` is another name
    of `reasoning_content`. `None` means left out."""

    nested: ClassVar[Mapping[str, type]] = {"content": TextPart, "tool_calls": MessageCall}
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None


def read_messages(
    messages: Sequence[Mapping[str, Any]], *, continues: bool = False
) -> list[dict[str, Any]]:
    """A conversation given as Python objects, as chat templates take it; the answer `continues` its
    last message, or begins a new one. Fields of answers that are empty or None may stand. Raises
    RequestError."""
    if not messages:
        raise refusal("empty_input", "messages is empty", "messages")
    found = [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    shown = template_messages(found)
    check_last(shown, continues=continues, param="messages")
    return shown


def check_last(messages: Sequence[Mapping[str, Any]], *, continues: bool, param: str) -> None:
    """Raises RequestError unless an answer can follow these messages, as a template takes them, or
    go on with the last of them. `param`: what the route calls them."""
    last = messages[-1]
    if not continues and last["role"] == "assistant":
        hint = ", unless continue_final_message is set" if param == "messages" else ""
        message = f"the last message must not be the assistant's{hint}"
        raise refusal("invalid_value", message, param)
    is_open = last["role"] == "assistant" and last["content"] and "tool_calls" not in last
    if continues and not is_open:
        message = "what is continued is a message of the assistant with content and without calls"
        raise refusal("invalid_value", message, param)


def _read_message(message: Mapping[str, Any], where: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise refusal("invalid_type", f"{where} is not a mapping", where)
    given = {}
    for name, value in message.items():
        if name in ChatMessage.__struct_fields__:
            given[name] = value
        elif value:
            path = f"{where}.{name}"
            raise refusal("unknown_parameter", f"unknown parameter {path}", path)
    if "role" not in given:
        raise refusal("missing_field", f"{where}.role is required", f"{where}.role")
    try:
        return msgspec.convert(given, ChatMessage)
    except msgspec.ValidationError as error:
        raise refusal("invalid_type", f"{where}: {error}", where) from None


def template_messages(
    messages: Sequence[ChatMessage],
    names: FieldNames = CHAT_NAMES,
    places: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """The messages as a chat template takes them, content as one string. For errors: `names` of
    fields, and `places` of the messages in what the caller gave. Raises RequestError."""
    result = []
    known: set[str] = set()  # ids of the calls so far
    for i, message in enumerate(messages):
        where = f"{names.messages}[{i}]" if places is None else places[i]
        if message.role not in ROLES:
            raise refusal(
                "invalid_value", f"role must be one of {', '.join(ROLES)}", f"{where}.role"
            )
        _check_calls(message, known, where, names.call_id)
        entry: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": _text_of(message, f"{where}.content"),
        }
        if message.name is not None:
            entry["name"] = message.name
        reasoning = message.reasoning_content or message.reasoning
        if reasoning is not None:
            entry["reasoning_content"] = reasoning
        if message.tool_calls:
            known.update(call.id for call in message.tool_calls)
            entry["tool_calls"] = [_template_call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        result.append(entry)
    return result


def _check_calls(message: ChatMessage, known: set[str], where: str, call_id: str) -> None:
    """Raises RequestError unless the fields about calls fit the role. `known` are the ids of the
    calls before this message, `call_id` is the name of the field that refers to one."""
    if message.tool_calls and message.role != "assistant":
        raise refusal("invalid_value", "only the assistant has tool_calls", f"{where}.tool_calls")
    for i, call in enumerate(message.tool_calls or ()):
        if call.type != "function":
            where = f"{where}.tool_calls[{i}].type"
            raise refusal("unsupported_parameter", "only calls of functions are supported", where)
    where = f"{where}.{call_id}"
    if message.role != "tool":
        if message.tool_call_id is not None:
            raise refusal("invalid_value", f"only messages of role tool have {call_id}", where)
    elif message.tool_call_id is None:
        raise refusal("missing_field", f"{where} is required", where)
    elif message.tool_call_id not in known:
        raise refusal("invalid_value", "no message before has a tool call of this id", where)


def _template_call(call: MessageCall) -> dict[str, Any]:
    """A call as chat templates take it: the arguments are an object. Those that are no JSON object,
    as an answer that was cut may have them, stay text."""
    arguments: Any = call.function.arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        arguments = value
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _text_of(message: ChatMessage, where: str) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise refusal("missing_field", f"{where} is required", where)
        return ""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.get("type") != "text":
            raise refusal(
                "unsupported_parameter",
                "only parts of type text are supported",
                f"{where}[{i}].type",
            )
        if not isinstance(part.get("text"), str):
            raise refusal("invalid_type", "text must be a string", f"{where}[{i}].text")
    return "\n".join(part["text"] for part in content)
