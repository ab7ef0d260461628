"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError
from ..messages import TextDelta
from .admission import admit, check_sampling
from .exchange import Exchange
from .logprobs import TokenNames
from .openai_common import (
    FINGERPRINT,
    Usage,
    cache_key,
    check_name,
    check_stream_options,
    finish_of,
    openai_sampling,
)
from .protocol import MAX_MESSAGES, ChatBody, ChatMessage, TemplateOptions
from .responses import event, to_json
from .submission import Submission
from .tokenizer_manager import Prompt, TokenizerManager, new_id

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
        submission = manager.submit(
            [prompt],
            name=body.rid or new_id("chatcmpl-"),
            stream=bool(body.stream),
            extra_key=cache_key(body),
            started=exchange.started,
        )
        with submission:
            answer = _Answer(body, submission, self._names(prompt), manager.model_name, warnings)
            if body.stream:
                await answer.stream(exchange)
            else:
                await exchange.json(answer.whole(await submission.collect()))

    def _names(self, prompt: Prompt) -> TokenNames:
        return TokenNames(
            self._manager.tokenizer,
            skip_special=prompt.sampling.skip_special_tokens,
            keeps_stop=prompt.sampling.no_stop_trim,
        )

    async def _prompt(self, body: ChatBody) -> Prompt:
        manager = self._manager
        names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        if body.max_completion_tokens is not None:
            names["max_new_tokens"] = "max_completion_tokens"
        sampling = openai_sampling(body, manager.sampling_defaults, _max_tokens(body))
        check_sampling(sampling, manager.limits, names)
        _check_combinations(body)
        check_name(body.rid, "rid")
        options = template_options(manager, body.chat_template_kwargs, body.reasoning_effort)
        messages = template_messages(body.messages)
        if body.messages[-1].role == "assistant":
            raise RequestError(
                400, "invalid_value", "the last message must not be the assistant's",
                param="messages",
            )  # fmt: skip
        ids = await manager.encode_chat(messages, **options)
        sampling = admit(ids, sampling, manager.limits, prompt_param="messages", names=names)
        return Prompt(
            ids,
            sampling,
            return_logprob=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
        )


def _max_tokens(body: ChatBody) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            400, "invalid_combination", "max_tokens and max_completion_tokens differ",
            param="max_tokens",
        )  # fmt: skip
    for name in ("max_completion_tokens", "max_tokens"):
        value = getattr(body, name)
        if value is not None and value < 1:
            raise RequestError(400, "invalid_value", f"{name} must be at least 1", param=name)
    return old if new is None else new


def _check_combinations(body: ChatBody) -> None:
    check_stream_options(body)
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= _MAX_TOP:
        raise RequestError(
            400, "invalid_value", f"top_logprobs must be in [0, {_MAX_TOP}]", param="top_logprobs"
        )
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            400, "invalid_combination", "top_logprobs needs logprobs", param="top_logprobs"
        )


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
            raise RequestError(
                400, "unsupported_parameter", f"this model's chat template has no {name}",
                param=name,
            )  # fmt: skip
    return result


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as a template takes them, content as one string. Raises RequestError."""
    if not messages:
        raise RequestError(400, "empty_input", "messages is empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            400, "invalid_value", f"at most {MAX_MESSAGES} messages", param="messages"
        )
    result = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role == "tool":
            raise RequestError(
                400, "unsupported_parameter", "tool messages are not supported",
                param=f"{where}.role",
            )  # fmt: skip
        if message.role not in _ROLES:
            raise RequestError(
                400, "invalid_value", f"role must be one of {', '.join(_ROLES)}",
                param=f"{where}.role",
            )  # fmt: skip
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
        raise RequestError(400, "missing_field", f"{where} is required", param=where)
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Mapping[str, Any], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise RequestError(
            400, "unsupported_parameter", "only parts of type text are supported",
            param=f"{where}.type",
        )  # fmt: skip
    if not isinstance(text, str):
        raise RequestError(400, "invalid_type", "text must be a string", param=f"{where}.text")
    return text


class _Answer:
    """Builds what goes back, whole or as chunks."""

    def __init__(
        self,
        body: ChatBody,
        submission: Submission,
        names: TokenNames,
        model: str,
        warnings: list[str],
    ) -> None:
        self._submission = submission
        self._names = names
        self._logprobs = bool(body.logprobs)
        self._warnings = warnings
        self._usage = Usage(submission)
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._head = {
            "id": submission.name,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._prefix = b"data: " + to_json(self._head)[:-1] + b',"choices":[{"index":'

    def whole(self, deltas: list[TextDelta]) -> dict[str, Any]:
        self._usage.add(enumerate(deltas))
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": delta.text},
                "logprobs": {"content": self._names.chat(delta)} if self._logprobs else None,
                **finish_of(delta.finish),
            }
            for i, delta in enumerate(deltas)
        ]
        result = {**self._head, "choices": choices, "usage": self._usage.object()}
        return {**result, "warnings": self._warnings} if self._warnings else result

    async def stream(self, exchange: Exchange) -> None:
        started: set[int] = set()
        while batch := await self._submission.next_batch():
            frames = b""
            self._usage.add(batch.items())
            for choice, delta in batch.items():
                if choice not in started:
                    frames += self._first(choice, warn=not started)
                    started.add(choice)
                frames += self._chunks(choice, delta)
            if frames:
                await exchange.events.write(frames)
        tail = b""
        if self._include_usage:
            tail = event({**self._head, "choices": [], "usage": self._usage.object()})
        await exchange.events.done(tail)

    def _first(self, choice: int, *, warn: bool) -> bytes:
        extra = b',"warnings":' + to_json(self._warnings) if warn and self._warnings else b""
        return self._chunk(choice, b'{"role":"assistant","content":""}', extra=extra)

    def _chunks(self, choice: int, delta: TextDelta) -> bytes:
        frames = b""
        content = self._names.chat(delta) if self._logprobs else []
        if delta.text or content:
            logprobs = to_json({"content": content}) if content else b"null"
            frames = self._chunk(choice, b'{"content":' + to_json(delta.text) + b"}", logprobs)
        if delta.finish is not None:
            frames += self._chunk(choice, b"{}", finish=to_json(finish_of(delta.finish)))
        return frames

    def _chunk(
        self,
        choice: int,
        delta: bytes,
        logprobs: bytes = b"null",
        finish: bytes = b'{"finish_reason":null}',
        extra: bytes = b"",
    ) -> bytes:
        usage = b""
        if self._usage_always:
            usage = b',"usage":' + to_json(self._usage.object())
        elif self._include_usage:
            usage = b',"usage":null'
        return b'%b%d,"delta":%b,"logprobs":%b,%b]%b%b}\n\n' % (
            self._prefix, choice, delta, logprobs, finish[1:], usage, extra,
        )  # fmt: skip
