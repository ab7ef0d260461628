"""POST /v1/chat/completions and /v1/completions: one path, two shapes."""

from __future__ import annotations

import asyncio
import codecs
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from .. import __version__
from ..errors import refusal
from ..messages import FinishReason, Generate, TextDelta
from .answer import Answer, new_request
from .exchange import Exchange, event
from .output import FLOOR, Scored, scored
from .protocol import OPENAI_NAMES, ChatBody, ChatMessage, CompletionBody, OpenAIBody, StreamOptions, TemplateOptions
from .tokenizer_manager import Batch, TokenizerManager, new_id

_ROLES = ("system", "developer", "user", "assistant")
_DEFAULT_MAX_TOKENS = 16  # of a completion


async def chat(exchange: Exchange, body: ChatBody) -> None:
    manager = exchange.manager
    options = template_options(manager, body.chat_template_kwargs, body.reasoning_effort)
    messages = template_messages(body.messages)
    if body.messages[-1].role == "assistant":
        raise refusal("invalid_value", "the last message must not be the assistant's", "messages")
    names = dict(OPENAI_NAMES)
    if body.max_completion_tokens is not None:
        names["max_new_tokens"] = "max_completion_tokens"
    ids = await manager.encode_chat(messages, **options)
    wanted = {"return_logprob": bool(body.logprobs), "top_logprobs": body.top_logprobs or 0}
    request = new_request(exchange, body, ids, "messages", names, None, **wanted)
    await _ChatAnswer(exchange, body, [request]).send()


async def completions(exchange: Exchange, body: CompletionBody) -> None:
    manager, scores = exchange.manager, body.logprobs is not None
    all_ids = await manager.encode(body.prompt, "prompt")
    start = 0 if body.echo and scores else -1
    wanted = {"return_logprob": scores, "logprob_start": start, "top_logprobs": body.logprobs or 0}
    requests = [
        new_request(exchange, body, ids, "prompt", OPENAI_NAMES, _DEFAULT_MAX_TOKENS, **wanted) for ids in all_ids
    ]
    echoed: list[Any] = [""] * len(requests)
    if body.echo:
        echoed = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not isinstance(echoed[0], str):
            decode, skip = manager.tokenizer.decode, requests[0].sampling.skip_special_tokens
            echoed = await asyncio.to_thread(lambda: [decode(ids, skip) for ids in all_ids])
    await _CompletionAnswer(exchange, body, requests, echoed).send()


def template_options(
    manager: TokenizerManager, options: TemplateOptions | None, effort: str | None = None
) -> dict[str, Any]:
    """Variables for the chat template. One that the template does not know is refused unless its value is what such a
    template does anyway."""
    values = msgspec.structs.asdict(options or TemplateOptions())
    values["reasoning_effort"] = effort or values["reasoning_effort"]
    template = manager.tokenizer.chat_template
    known = template.variables if template is not None else frozenset()
    for name, value in values.items():
        if name not in known and value not in (None, False, "none"):
            raise refusal("unsupported_parameter", f"this model's chat template has no {name}", name)
    return {name: value for name, value in values.items() if name in known and value is not None}


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as a template takes them, content as one string. Raises RequestError."""
    result = []
    for i, message in enumerate(messages):
        if message.role not in _ROLES:
            code = "unsupported_parameter" if message.role == "tool" else "invalid_value"
            raise refusal(code, f"role must be one of {', '.join(_ROLES)}", f"messages[{i}].role")
        role = "system" if message.role == "developer" else message.role
        entry = {"role": role, "content": _content(message.content, f"messages[{i}].content")}
        optional = {"name": message.name, "reasoning_content": message.reasoning_content}
        result.append(entry | {name: value for name, value in optional.items() if value is not None})
    return result


def _content(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if content is None:
        raise refusal("missing_field", f"{where} is required", where)
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.get("type") != "text":
            raise refusal("unsupported_parameter", "only parts of type text are supported", f"{where}[{i}].type")
        if not isinstance(part.get("text"), str):
            raise refusal("invalid_type", "text must be a string", f"{where}[{i}].text")
    return "\n".join(part["text"] for part in content)


class _OpenAIAnswer(Answer):
    """What chat and completions share. A prompt counts once in the usage, however many choices it has."""

    def __init__(self, exchange: Exchange, body: OpenAIBody, requests: list[Generate], kind: str, prefix: str) -> None:
        super().__init__(exchange, body, requests, body.rid or new_id(prefix))
        self._tokenizer, self._sampling = exchange.manager.tokenizer, requests[0].sampling
        self._options = body.stream_options or StreamOptions()
        self._started: set[int] = set()
        self._cached: dict[str, int] = {}
        self._completion = [0] * len(self.request_of)
        self._head = {
            "id": self.name,
            "object": kind,
            "created": int(time.time()),
            "model": exchange.manager.model_name,
            "system_fingerprint": f"radix-{__version__}",
        }

    @abstractmethod
    def choice(self, choice: int, delta: TextDelta) -> dict[str, Any]:
        """The whole choice, less index and finish reason."""

    @abstractmethod
    def chunks(self, choice: int, delta: TextDelta, first: bool) -> Iterable[dict[str, Any]]:
        """The chunk choices that `delta` gives, less the index."""

    def whole(self, deltas: list[TextDelta]) -> dict[str, Any]:
        self._count(dict(enumerate(deltas)))
        choices = [{"index": i, **self.choice(i, delta), **_finish(delta.finish)} for i, delta in enumerate(deltas)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def frames(self, batch: Batch) -> bytes:
        self._count(batch)
        frames, extra = b"", {}
        if self._options.include_usage or self._options.continuous_usage_stats:
            extra["usage"] = self._usage() if self._options.continuous_usage_stats else None
        for choice, delta in batch.items():
            for chunk in self.chunks(choice, delta, choice not in self._started):
                warnings, self.exchange.warnings = self.exchange.warnings, []  # only in the first frame
                told = {"warnings": warnings} if warnings else {}
                frames += event({**self._head, "choices": [{"index": choice, **chunk}], **extra, **told})
            self._started.add(choice)
        return frames

    def tail(self) -> bytes:
        return event({**self._head, "choices": [], "usage": self._usage()}) if self._options.include_usage else b""

    def _count(self, batch: Batch) -> None:
        for choice, delta in batch.items():
            # The first choice of a prompt to start tells what the cache gave to the prompt; the
            # others find it there by design.
            self._cached.setdefault(self.request_of[choice].rid, delta.cached_tokens)
            self._completion[choice] = delta.completion_tokens

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(request.input_ids) // 4 for request in self.requests)
        completion = sum(self._completion)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    # Logprobs. `bytes` of a token are its raw bytes, so that those of all tokens make the text.

    def _shown(self, token: int) -> bytes:
        """A token that is not shown has no bytes."""
        skipped = self._sampling.skip_special_tokens and token in self._tokenizer.special_ids
        return b"" if skipped else self._tokenizer.id_to_bytes(token)

    def _entries(self, delta: TextDelta) -> list[tuple[Scored, bytes]]:
        """The scored tokens of `delta` and what is shown of each: nothing of a stop token, unless it was to be kept."""
        entries = [(entry, self._shown(entry.token)) for entry in scored(delta.logprobs)]
        if entries and delta.finish is not None and not self._sampling.no_stop_trim:
            last = entries[-1][0]
            if delta.finish.matched == last.token:
                entries[-1] = last, b""
        return entries


class _ChatAnswer(_OpenAIAnswer):
    def __init__(self, exchange: Exchange, body: ChatBody, requests: list[Generate]) -> None:
        super().__init__(exchange, body, requests, f"chat.completion{'.chunk' if body.stream else ''}", "chatcmpl-")

    def choice(self, choice: int, delta: TextDelta) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": delta.text}, "logprobs": self._logprobs(delta)}

    def chunks(self, choice: int, delta: TextDelta, first: bool) -> Iterator[dict[str, Any]]:
        """The role alone, then content, then the finish reason alone."""
        nothing = {"logprobs": None, **_finish(None)}
        if first:
            yield {"delta": {"role": "assistant", "content": ""}, **nothing}
        logprobs = self._logprobs(delta)
        if delta.text or (logprobs and logprobs["content"]):
            yield {"delta": {"content": delta.text}, **nothing, "logprobs": logprobs}
        if delta.finish is not None:
            yield {"delta": {}, **nothing, **_finish(delta.finish)}

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        if not self.requests[0].return_logprob:
            return None
        content = []
        for entry, shown in self._entries(delta):
            top = [self._token(token, value, self._shown(token)) for token, value in entry.top]
            content.append({**self._token(entry.token, entry.logprob, shown), "top_logprobs": top})
        return {"content": content}

    def _token(self, token: int, logprob: float | None, shown: bytes) -> dict[str, Any]:
        value = FLOOR if logprob is None else logprob
        return {"token": self._tokenizer.id_to_text(token), "logprob": value, "bytes": list(shown)}


class _CompletionAnswer(_OpenAIAnswer):
    """`echoed`: the text that goes before the choices of each prompt. `text_offset` goes on from chunk to chunk, in
    characters of the text that the choice shows (with echo the prompt is part of it)."""

    def __init__(self, exchange: Exchange, body: CompletionBody, requests: list[Generate], echoed: list[str]) -> None:
        super().__init__(exchange, body, requests, "text_completion", "cmpl-")
        self._echoed = [text for text in echoed for _ in range(self._sampling.n)]
        self._prompt_scores: dict[str, list[Scored]] = {}
        self._utf8 = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self.request_of]
        self._offset = [0] * len(self.request_of)

    def choice(self, choice: int, delta: TextDelta, first: bool = True) -> dict[str, Any]:
        text = self._echoed[choice] + delta.text if first else delta.text
        return {"text": text, "logprobs": self._logprobs(choice, delta, first)}

    def chunks(self, choice: int, delta: TextDelta, first: bool) -> Iterator[dict[str, Any]]:
        content = self.choice(choice, delta, first)
        if content["text"] or content["logprobs"] or delta.finish or first:
            yield {**content, **_finish(delta.finish)}

    def _logprobs(self, choice: int, delta: TextDelta, first: bool) -> dict[str, Any] | None:
        request = self.request_of[choice]
        entries = self._entries(delta)
        if delta.prompt_logprobs is not None:
            self._prompt_scores[request.rid] = scored(delta.prompt_logprobs)
        if first:
            prompt = self._prompt_scores.get(request.rid, ())
            entries = [(entry, self._shown(entry.token)) for entry in prompt] + entries
        if not entries:
            return None
        offsets = []
        for _, shown in entries:
            offsets.append(self._offset[choice])
            self._offset[choice] += len(self._utf8[choice].decode(shown))
        return {
            "tokens": [self._tokenizer.id_to_text(entry.token) for entry, _ in entries],
            "token_logprobs": [entry.logprob for entry, _ in entries],
            "top_logprobs": [self._top(entry) for entry, _ in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: Scored) -> dict[str, float] | None:
        """The sampled token is always there; of tokens with the same text the likeliest is."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, value in [*entry.top, (entry.token, entry.logprob)]:
            text = self._tokenizer.id_to_text(token)
            top[text] = max(value, top.get(text, FLOOR))
        return top


def _finish(finish: FinishReason | None) -> dict[str, Any]:
    """`matched_stop` is the id or the string that ended the choice, else null."""
    return {"finish_reason": finish and finish.type, "matched_stop": finish and finish.matched}
