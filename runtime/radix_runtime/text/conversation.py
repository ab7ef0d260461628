"""The messages of a conversation: what callers may give, and what a chat template takes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import refusal


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message's content."""

    type: str
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of a conversation; parts of its content are TextPart."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None


ROLES = ("system", "developer", "user", "assistant")
Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation given as Python objects, as a chat template takes it. What an answer leaves
    empty (`tool_calls` None or []) may stand in its messages. Raises RequestError."""
    if not all(isinstance(message, Mapping) for message in messages):
        why = "a conversation is a list of messages, each with role and content"
        raise refusal("invalid_type", why, "messages")
    given = [
        {name: value for name, value in message.items() if value is not None and value != []}
        for message in messages
    ]
    try:
        parsed = msgspec.convert(given, Messages)
    except msgspec.ValidationError as error:
        raise refusal("invalid_value", f"messages: {error}", "messages") from None
    if parsed[-1].role == "assistant":
        raise refusal("invalid_value", "the last message must not be the assistant's", "messages")
    return template_messages(parsed)


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
