"""Messages of a conversation: as clients give them, and as chat templates take them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import refusal

ROLES = ("system", "developer", "user", "assistant")


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message's content."""

    type: str
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of a conversation; parts of its content are TextPart. `None` means left out."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation given as Python objects, as chat templates take it. Fields of answers that
    are empty or None may stand. Raises RequestError."""
    if not messages:
        raise refusal("empty_input", "messages is empty", "messages")
    found = [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if found[-1].role == "assistant":
        raise refusal("invalid_value", "the last message must not be the assistant's", "messages")
    return template_messages(found)


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


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as a chat template takes them, content as one string. Raises RequestError."""
    result = []
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            code = "unsupported_parameter" if message.role == "tool" else "invalid_value"
            raise refusal(code, f"role must be one of {', '.join(ROLES)}", f"messages[{i}].role")
        entry = {
            "role": "system" if message.role == "developer" else message.role,
            "content": _text_of(message, f"messages[{i}].content"),
        }
        if message.name is not None:
            entry["name"] = message.name
        if message.reasoning_content is not None:
            entry["reasoning_content"] = message.reasoning_content
        result.append(entry)
    return result


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
