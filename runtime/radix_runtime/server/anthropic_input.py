"""What /v1/messages is given, as a conversation: blocks, the system prompt and tools."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import RequestError, refusal
from ..text.conversation import CalledFunction, ChatMessage, MessageCall
from ..text.field_names import FieldNames
from ..text.tools import FunctionSpec, ToolSpec, tool_use
from .chat_request import Conversation
from .protocol import MESSAGES_NAMES, CountBody

NAMES = FieldNames(
    tool_name="name",
    tool_parameters="input_schema",
    call_id="tool_use_id",
    effort="output_config.effort",
    sampling=MESSAGES_NAMES,
)
Placed = tuple[str, ChatMessage]  # where a message stands in the body, and the message
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_FIELDS = ("name", "description", "input_schema", "strict", "type", "cache_control")


def read_messages_body(body: CountBody) -> Conversation:
    """The conversation of a body; a last message of the assistant is continued. Raises
    RequestError."""
    choice, parallel = _tool_choice(body.tool_choice)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])]
    placed: list[Placed] = []
    system = None if body.system is None else _text(body.system, "system")
    if system:
        placed.append(("system", ChatMessage(role="system", content=system)))
    for i, message in enumerate(body.messages):
        placed.extend(_messages(message, f"messages[{i}]"))
    return Conversation(
        messages=[message for _, message in placed],
        tools=tool_use(tools, choice, parallel=parallel, names=NAMES),
        continues=bool(body.messages) and body.messages[-1].get("role") == "assistant",
        places=[place for place, _ in placed],
    )


def _tool(tool: Mapping[str, Any], where: str) -> ToolSpec:
    if tool.get("type", "custom") not in ("custom", None):
        message = f"{where}: only tools that run at the client are supported"
        raise refusal("unsupported_parameter", message, f"{where}.type")
    unknown = sorted(name for name in set(tool) - set(_TOOL_FIELDS) if tool[name] is not None)
    if unknown:
        path = f"{where}.{unknown[0][:64]}"
        raise refusal("unknown_parameter", f"unknown parameter {path}", path)
    schema = tool.get("input_schema")
    if schema is not None and not isinstance(schema, dict):
        raise _wrong_type(f"{where}.input_schema", "an object")
    description = tool.get("description")
    function = FunctionSpec(
        name=_string(tool, "name", where),
        description=None if description is None else _string(tool, "description", where),
        parameters=schema,
        strict=tool.get("strict") is True,
    )
    return ToolSpec(type="function", function=function)


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """The choice as OpenAI has it, and whether several tools may be called at once."""
    if choice is None:
        return None, None
    parallel = not choice.get("disable_parallel_tool_use")
    if choice.get("type") == "tool":
        name = _string(choice, "name", "tool_choice")
        return {"type": "function", "function": {"name": name}}, parallel
    kind = _CHOICES.get(str(choice.get("type")))
    if kind is None:
        message = "tool_choice.type must be auto, any, tool or none"
        raise refusal("invalid_tool", message, "tool_choice.type")
    return kind, parallel


def _messages(message: Mapping[str, Any], where: str) -> Iterator[Placed]:
    """One message of this API as one or several of a chat: each result of a tool is one."""
    role = _string(message, "role", where)
    content = message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refusal("invalid_value", f"{where}.role: must be user or assistant", f"{where}.role")
    if isinstance(content, str):
        yield where, ChatMessage(role=role, content=content)
        return
    if not isinstance(content, list):
        raise _wrong_type(f"{where}.content", "a text or a list of blocks")
    if role == "assistant":
        yield where, _assistant(content, f"{where}.content")
    else:
        yield from _inputs(role, content, where)


def _inputs(role: str, blocks: list[Any], where: str) -> Iterator[Placed]:
    texts = []
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        kind = _kind(block, place)
        if kind == "tool_result":
            call_id = _string(block, "tool_use_id", place)
            text = _text(block.get("content") or "", f"{place}.content")
            yield place, ChatMessage(role="tool", tool_call_id=call_id, content=text)
        elif kind == "text":
            texts.append(_string(block, "text", place))
        else:
            raise _unsupported(place)
    if texts:
        yield where, ChatMessage(role=role, content="\n".join(texts))


def _assistant(blocks: list[Any], where: str) -> ChatMessage:
    texts = []
    thoughts = []
    calls = []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        kind = _kind(block, place)
        if kind == "text":
            texts.append(_string(block, "text", place))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", place))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = CalledFunction(name=_string(block, "name", place), arguments=arguments)
            calls.append(MessageCall(id=_string(block, "id", place), function=function))
        else:
            raise _unsupported(place)
    return ChatMessage(
        role="assistant",
        content="".join(texts),
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _kind(block: Any, where: str) -> str:
    if not isinstance(block, Mapping):
        raise _wrong_type(where, "a block")
    return _string(block, "type", where)


def _text(content: Any, where: str) -> str:
    """The text of a string or of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong_type(where, "a text or a list of blocks")
    texts = []
    for i, block in enumerate(content):
        if _kind(block, f"{where}[{i}]") != "text":
            raise _unsupported(f"{where}[{i}]")
        texts.append(_string(block, "text", f"{where}[{i}]"))
    return "\n".join(texts)


def _string(value: Mapping[str, Any], name: str, where: str) -> str:
    found = value.get(name)
    if found is None:
        raise refusal("missing_field", f"{where}.{name} is required", f"{where}.{name}")
    if not isinstance(found, str):
        raise _wrong_type(f"{where}.{name}", "a text")
    return found


def _unsupported(where: str) -> RequestError:
    message = f"{where}: blocks of this type are not supported"
    return refusal("unsupported_parameter", message, f"{where}.type")


def _wrong_type(where: str, what: str) -> RequestError:
    return refusal("invalid_type", f"{where}: must be {what}", where)
