"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import refusal
from ..messages import Generate, TextDelta
from .answer import OpenAIAnswer, finish_of, new_request
from .exchange import Exchange
from .protocol import OPENAI_NAMES, ChatBody, ChatMessage, TemplateOptions
from .responses import to_json
from .tokenizer_manager import TokenizerManager

_ROLES = ("system", "developer", "user", "assistant")


async def chat_completions(exchange: Exchange) -> None:
    manager = exchange.manager
    manager.require_ready()
    body = exchange.decode(ChatBody)
    manager.check_model(body.model)
    options = template_options(manager, body.chat_template_kwargs, body.reasoning_effort)
    messages = template_messages(body.messages)
    if body.messages[-1].role == "assistant":
        message = "the last message must not be the assistant's"
        raise refusal("invalid_value", message, "messages")
    names = dict(OPENAI_NAMES)
    if body.max_completion_tokens is not None:
        names["max_new_tokens"] = "max_completion_tokens"
    request = new_request(
        manager, body, await manager.encode_chat(messages, **options),
        prompt_param="messages", names=names, max_new_tokens=None,
        return_logprob=bool(body.logprobs), top_logprobs=body.top_logprobs or 0,
    )  # fmt: skip
    await _ChatAnswer(exchange, body, request).send()


def template_options(
    manager: TokenizerManager, options: TemplateOptions | None, effort: str | None = None
) -> dict[str, Any]:
    """Variables for the chat template. One that the template does not know is refused unless its
    value is what such a template does anyway."""
    values = msgspec.structs.asdict(options or TemplateOptions())
    values["reasoning_effort"] = effort or values["reasoning_effort"]
    template = manager.tokenizer.chat_template
    known = template.variables if template is not None else frozenset()
    for name, value in values.items():
        if name not in known and value not in (None, False, "none"):
            message = f"this model's chat template has no {name}"
            raise refusal("unsupported_parameter", message, name)
    return {name: value for name, value in values.items() if name in known and value is not None}


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as a template takes them, content as one string. Raises RequestError."""
    result = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role not in _ROLES:
            code = "unsupported_parameter" if message.role == "tool" else "invalid_value"
            raise refusal(code, f"role must be one of {', '.join(_ROLES)}", f"{where}.role")
        entry: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": _content(message.content, f"{where}.content"),
        }
        for name in ("name", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                entry[name] = value
        result.append(entry)
    return result


def _content(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if content is None:
        raise refusal("missing_field", f"{where} is required", where)
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Mapping[str, Any], where: str) -> str:
    if part.get("type") != "text":
        message = "only parts of type text are supported"
        raise refusal("unsupported_parameter", message, f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise refusal("invalid_type", "text must be a string", f"{where}.text")
    return text


_START = b'{"role":"assistant","content":""}'
_OPEN = b'"finish_reason":null}'


class _ChatAnswer(OpenAIAnswer):
    def __init__(self, exchange: Exchange, body: ChatBody, request: Generate) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(exchange, body, [request], kind, "chatcmpl-")
        self._logprobs = request.return_logprob

    def choice(self, choice: int, delta: TextDelta) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": delta.text},
            "logprobs": {"content": self.names.chat(delta)} if self._logprobs else None,
        }

    def chunks(self, choice: int, delta: TextDelta, first: bool) -> Iterator[bytes]:
        """The role alone, then content, then the finish reason alone."""
        if first:
            yield _chunk(choice, _START)
        content = self.names.chat(delta) if self._logprobs else []
        if delta.text or content:
            logprobs = to_json({"content": content}) if content else b"null"
            yield _chunk(choice, b'{"content":' + to_json(delta.text) + b"}", logprobs)
        if delta.finish is not None:
            yield _chunk(choice, b"{}", end=to_json(finish_of(delta.finish))[1:])


def _chunk(choice: int, delta: bytes, logprobs: bytes = b"null", end: bytes = _OPEN) -> bytes:
    return b'{"index":%d,"delta":%b,"logprobs":%b,%b' % (choice, delta, logprobs, end)
