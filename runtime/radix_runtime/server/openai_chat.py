"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import refusal
from ..messages import TextDelta
from .admission import admit, check_sampling
from .exchange import Exchange
from .logprobs import TokenNames
from .openai_common import (
    answer_call,
    check_stream_options,
    finish_of,
    openai_sampling,
    token_names,
)
from .protocol import MAX_MESSAGES, ChatBody, ChatMessage, OpenAIBody, TemplateOptions
from .responses import to_json
from .tokenizer_manager import Prompt, TokenizerManager

_ROLES = ("system", "developer", "user", "assistant")
_MAX_TOP = 20


class ChatCompletions:
    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def __call__(self, exchange: Exchange) -> None:
        manager = self._manager
        manager.require_ready()
        body, warnings = exchange.decode(ChatBody)
        manager.check_model(body.model)
        prompt = await self._prompt(body)
        call = _Call(body, prompt, token_names(manager, prompt.sampling))
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        await answer_call(manager, exchange, call, kind, warnings)

    async def _prompt(self, body: ChatBody) -> Prompt:
        manager = self._manager
        names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        if body.max_completion_tokens is not None:
            names["max_new_tokens"] = "max_completion_tokens"
        sampling = openai_sampling(body, manager.sampling_defaults, _max_tokens(body))
        check_sampling(sampling, manager.limits, names)
        _check_combinations(body)
        options = template_options(manager, body.chat_template_kwargs, body.reasoning_effort)
        messages = template_messages(body.messages)
        if body.messages[-1].role == "assistant":
            text = "the last message must not be the assistant's"
            raise refusal("invalid_value", text, "messages")
        ids = await manager.encode_chat(messages, **options)
        sampling = admit(ids, sampling, manager.limits, prompt_param="messages", names=names)
        logprobs, top = bool(body.logprobs), body.top_logprobs or 0
        return Prompt(ids, sampling, return_logprob=logprobs, top_logprobs=top)


def _max_tokens(body: ChatBody) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise refusal(
            "invalid_combination", "max_tokens and max_completion_tokens differ", "max_tokens"
        )
    for name in ("max_completion_tokens", "max_tokens"):
        value = getattr(body, name)
        if value is not None and value < 1:
            raise refusal("invalid_value", f"{name} must be at least 1", name)
    return old if new is None else new


def _check_combinations(body: ChatBody) -> None:
    check_stream_options(body)
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= _MAX_TOP:
        raise refusal("invalid_value", f"top_logprobs must be in [0, {_MAX_TOP}]", "top_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise refusal("invalid_combination", "top_logprobs needs logprobs", "top_logprobs")


def template_options(
    manager: TokenizerManager, options: TemplateOptions | None, effort: str | None = None
) -> dict[str, Any]:
    """Variables for the chat template. One that the template does not know is refused unless its
    value is what such a template does anyway."""
    values = {
        "enable_thinking": None if options is None else options.enable_thinking,
        "reasoning_effort": effort or (None if options is None else options.reasoning_effort),
    }
    template = manager.tokenizer.chat_template
    known = template.variables if template is not None else frozenset()
    result: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        if name in known:
            result[name] = value
        elif value not in (False, "none"):
            raise refusal(
                "unsupported_parameter", f"this model's chat template has no {name}", name
            )
    return result


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as a template takes them, content as one string. Raises RequestError."""
    if not messages:
        raise refusal("empty_input", "messages is empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise refusal("invalid_value", f"at most {MAX_MESSAGES} messages", "messages")
    result = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role == "tool":
            raise refusal(
                "unsupported_parameter", "tool messages are not supported", f"{where}.role"
            )
        if message.role not in _ROLES:
            raise refusal(
                "invalid_value", f"role must be one of {', '.join(_ROLES)}", f"{where}.role"
            )
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": _content(message, f"{where}.content")}
        for name in ("name", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                entry[name] = value
        result.append(entry)
    return result


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if content is None:
        raise refusal("missing_field", f"{where} is required", where)
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Mapping[str, Any], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise refusal(
            "unsupported_parameter", "only parts of type text are supported", f"{where}.type"
        )
    if not isinstance(text, str):
        raise refusal("invalid_type", "text must be a string", f"{where}.text")
    return text


_START = b'{"role":"assistant","content":""}'
_OPEN = b'"finish_reason":null}'


class _Call:
    def __init__(self, body: ChatBody, prompt: Prompt, names: TokenNames) -> None:
        self.body: OpenAIBody = body
        self.prompts = [prompt]
        self._names = names
        self._logprobs = bool(body.logprobs)

    def choice(self, choice: int, delta: TextDelta) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": delta.text},
            "logprobs": {"content": self._names.chat(delta)} if self._logprobs else None,
        }

    def chunks(self, choice: int, delta: TextDelta, first: bool) -> Iterator[bytes]:
        """The role alone, then content, then the finish reason alone."""
        if first:
            yield _chunk(choice, _START)
        content = self._names.chat(delta) if self._logprobs else []
        if delta.text or content:
            logprobs = to_json({"content": content}) if content else b"null"
            yield _chunk(choice, b'{"content":' + to_json(delta.text) + b"}", logprobs)
        if delta.finish is not None:
            yield _chunk(choice, b"{}", end=to_json(finish_of(delta.finish))[1:])


def _chunk(choice: int, delta: bytes, logprobs: bytes = b"null", end: bytes = _OPEN) -> bytes:
    return b'{"index":%d,"delta":%b,"logprobs":%b,%b' % (choice, delta, logprobs, end)
