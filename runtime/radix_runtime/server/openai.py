"""POST /v1/chat/completions and /v1/completions: one path, two shapes."""

import codecs
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from .. import __version__
from ..errors import refusal
from ..messages import FinishReason, Generate, TextDelta, pack_ids
from ..sampling_params import SamplingParams
from . import protocol
from .exchange import Exchange, event
from .generation import FLOOR, Scored, scored
from .protocol import (
    OPENAI_NAMES,
    ChatBody,
    CompletionBody,
    NativeBody,
    OpenAIBody,
    Sampling,
    TemplateOptions,
)
from .tokenizer_manager import Batch, TokenizerManager, new_id


async def chat(exchange: Exchange, body: ChatBody) -> None:
    options = template_options(exchange.manager, body.chat_template_kwargs, body.reasoning_effort)
    messages = protocol.template_messages(body.messages)
    if body.messages[-1].role == "assistant":
        raise refusal("invalid_value", "the last message must not be the assistant's", "messages")
    longest = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    ids = await exchange.manager.encode_chat(messages, **options)
    wanted = {"return_logprob": bool(body.logprobs), "top_logprobs": body.top_logprobs or 0}
    request = new_request(
        exchange, body, ids, "messages", {**OPENAI_NAMES, "max_new_tokens": longest}, **wanted
    )
    await _OpenAIAnswer(exchange, body, [request], [""]).send()


async def completions(exchange: Exchange, body: CompletionBody) -> None:
    manager, scores = exchange.manager, body.logprobs is not None
    all_ids = await manager.encode(body.prompt, "prompt")
    start = 0 if body.echo and scores else -1
    wanted = {"return_logprob": scores, "logprob_start": start, "top_logprobs": body.logprobs or 0}
    requests = [
        new_request(exchange, body, ids, "prompt", OPENAI_NAMES, **wanted) for ids in all_ids
    ]
    echoed: list[Any] = [""] * len(requests)
    if body.echo:
        echoed = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not isinstance(echoed[0], str):
            echoed = await manager.decode(all_ids, requests[0].sampling.skip_special_tokens)
    await _OpenAIAnswer(exchange, body, requests, echoed).send()


def new_request(
    exchange: Exchange,
    body: Sampling,
    ids: Sequence[int],
    param: str,
    names: Mapping[str, str],
    **fields: Any,
) -> Generate:
    """A request that fits. `names`: see Limits.admit. Raises RequestError."""
    sampling = SamplingParams(
        **{name: getattr(body, name) for name in SamplingParams.__struct_fields__}
    )
    if clip := sampling.max_new_tokens is None:
        sampling.max_new_tokens = body.default_length
    sampling.stop = [body.stop] if isinstance(body.stop, str) else body.stop
    sampling = exchange.manager.limits.admit(ids, sampling, param, names, clip)
    seconds = exchange.manager.args.request_timeout
    return Generate(
        new_id(""),
        pack_ids(ids),
        sampling,
        deadline=seconds and time.monotonic() + seconds,
        **fields,
    )


def template_options(
    manager: TokenizerManager, given: TemplateOptions | None, effort: str | None
) -> dict[str, Any]:
    """Variables for the chat template. One that it does not know is refused unless it does that
    anyway."""
    values = msgspec.structs.asdict(given or TemplateOptions())
    values["reasoning_effort"] = effort or values["reasoning_effort"]
    template = manager.tokenizer.chat_template
    known = template.variables if template is not None else frozenset()
    for name, value in values.items():
        if name not in known and value not in (None, False, "none"):
            raise refusal(
                "unsupported_parameter", f"this model's chat template has no {name}", name
            )
    return {name: value for name, value in values.items() if name in known and value is not None}


class Answer:
    """What goes back for one call, whole or as events; a route shapes it."""

    def __init__(
        self, exchange: Exchange, body: OpenAIBody | NativeBody, requests: list[Generate], name: str
    ) -> None:
        self.exchange, self.requests, self.name = exchange, requests, name
        self.labels = {
            r.rid: name if len(requests) == 1 else f"{name}-{i}" for i, r in enumerate(requests)
        }
        self.request_of = [r for r in requests for _ in range(r.sampling.n)]  # by choice
        self._stream = bool(body.stream)
        # Requests share cached prefixes only under the same key.
        key = "\x1f".join(part for part in (body.cache_salt, body.extra_key) if part)
        for request in requests:
            request.stream = self._stream
            request.extra_key = key or None
            request.call = requests[0].rid, len(self.request_of)

    async def send(self) -> None:
        exchange, submit = self.exchange, self.exchange.manager.submit
        with submit(self.requests, self.name, self.labels, exchange.started) as self.submission:
            if not self._stream:
                await exchange.answer(self.whole(await self.submission.collect()))
                return
            while batch := await self.submission.next_batch():
                if frames := b"".join(map(event, self.events(batch))):
                    await exchange.write(frames)
            await exchange.write(self.tail() + b"data: [DONE]\n\n", last=True)

    def whole(self, deltas: list[TextDelta]) -> Any:
        raise NotImplementedError

    def events(self, batch: Batch) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def tail(self) -> bytes:
        """The frame between the last of a choice and [DONE]."""
        return b""


class _OpenAIAnswer(Answer):
    """`echoed`: the text before the choices of each prompt. A prompt counts once in the usage,
    whatever its n."""

    def __init__(
        self, exchange: Exchange, body: OpenAIBody, requests: list[Generate], echoed: list[str]
    ) -> None:
        self._chat = isinstance(body, ChatBody)
        super().__init__(
            exchange, body, requests, body.rid or new_id("chatcmpl-" if self._chat else "cmpl-")
        )
        self._tokenizer, self._sampling = exchange.manager.tokenizer, requests[0].sampling
        self._options, choices = (
            body.stream_options or protocol.StreamOptions(),
            len(self.request_of),
        )
        self._started: set[int] = set()
        self._cached: dict[str, int] = {}
        self._completion = [0] * choices
        self._echoed = [text for text in echoed for _ in range(self._sampling.n)]
        self._utf8 = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(choices)]
        self._offset = [0] * choices  # in characters of the text that the choice shows
        kind = "chat.completion" + ".chunk" * self._stream if self._chat else "text_completion"
        about = {"created": int(time.time()), "model": exchange.manager.model_name}
        self._head = {
            "id": self.name,
            "object": kind,
            **about,
            "system_fingerprint": f"radix-{__version__}",
        }

    def whole(self, deltas: list[TextDelta]) -> dict[str, Any]:
        self._count(dict(enumerate(deltas)))
        choices = []
        for i, delta in enumerate(deltas):
            content = self._content(i, delta, True)
            if self._chat:
                content["message"] = {"role": "assistant", "content": content.pop("text")}
            choices.append({"index": i, **content, **_finish(delta.finish)})
        return {**self._head, "choices": choices, "usage": self._usage()}

    def events(self, batch: Batch) -> Iterator[dict[str, Any]]:
        self._count(batch)
        extra: dict[str, Any] = {}
        if self._options.include_usage or self._options.continuous_usage_stats:
            extra["usage"] = self._usage() if self._options.continuous_usage_stats else None
        for choice, delta in batch.items():
            first = choice not in self._started
            self._started.add(choice)
            content = self._content(choice, delta, first)
            for chunk in (_chat_chunks if self._chat else _completion_chunks)(
                content, delta.finish, first
            ):
                warnings, self.exchange.warnings = (
                    self.exchange.warnings,
                    [],
                )  # only in the first frame
                told = {"warnings": warnings} if warnings else {}
                yield {**self._head, "choices": [{"index": choice, **chunk}], **extra, **told}

    def tail(self) -> bytes:
        return (
            event({**self._head, "choices": [], "usage": self._usage()})
            if self._options.include_usage
            else b""
        )

    def _count(self, batch: Batch) -> None:
        for choice, delta in batch.items():
            # The first choice of a prompt to start tells what the cache gave to the prompt; the
            # others find it there by design.
            self._cached.setdefault(self.request_of[choice].rid, delta.cached_tokens)
            self._completion[choice] = delta.completion_tokens

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(request.input_ids) // 4 for request in self.requests)
        completion = sum(self._completion)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return {**usage, "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())}}

    def _content(self, choice: int, delta: TextDelta, first: bool) -> dict[str, Any]:
        request = self.request_of[choice]
        entries = [(entry, self._shown(entry.token)) for entry in scored(delta.logprobs)]
        if entries and delta.finish is not None and delta.finish.matched == entries[-1][0].token:
            if not self._sampling.no_stop_trim:
                entries[-1] = entries[-1][0], b""  # nothing is shown of the stop token
        prompt = scored(self.submission.prompt_logprobs.pop(choice, None))
        logprobs: dict[str, Any] | None = None
        if self._chat and request.return_logprob:
            logprobs = {"content": [self._chat_logprob(*entry) for entry in entries]}
        elif prompt or entries:
            logprobs = self._text_logprobs(choice, prompt, entries)
        return {"text": self._echoed[choice] * first + delta.text, "logprobs": logprobs}

    # The raw bytes of a token, so that those of all tokens make the text; one that is not shown has
    # none.
    def _shown(self, token: int) -> bytes:
        skipped = self._sampling.skip_special_tokens and token in self._tokenizer.special_ids
        return b"" if skipped else self._tokenizer.id_to_bytes(token)

    def _chat_logprob(self, entry: Scored, shown: bytes) -> dict[str, Any]:
        text, value = self._tokenizer.id_to_text, FLOOR if entry.logprob is None else entry.logprob
        top = [
            {"token": text(t), "logprob": v, "bytes": list(self._shown(t))} for t, v in entry.top
        ]
        return {
            "token": text(entry.token),
            "logprob": value,
            "bytes": list(shown),
            "top_logprobs": top,
        }

    def _text_logprobs(
        self, choice: int, prompt: list[Scored], output: list[tuple[Scored, bytes]]
    ) -> dict[str, Any]:
        entries, offsets = (
            [*((entry, self._tokenizer.id_to_bytes(entry.token)) for entry in prompt), *output],
            [],
        )
        for i, (entry, shown) in enumerate(entries):
            offsets.append(at := self._offset[choice])
            if i < len(prompt) and entry.token in self._tokenizer.special_ids:
                # In the echo it stands only if the client has written it, or special tokens are
                # shown.
                shown *= self._echoed[choice].startswith(shown.decode(), at)
            self._offset[choice] += len(self._utf8[choice].decode(shown))
        return {
            "tokens": [self._tokenizer.id_to_text(entry.token) for entry, _ in entries],
            "token_logprobs": [entry.logprob for entry, _ in entries],
            "top_logprobs": [self._top(entry) for entry, _ in entries],
            "text_offset": offsets,
        }

    # The sampled token is always there; of tokens with the same text the likeliest is.
    def _top(self, entry: Scored) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, value in [*entry.top, (entry.token, entry.logprob)]:
            text = self._tokenizer.id_to_text(token)
            top[text] = max(value, top.get(text, FLOOR))
        return top


# The role alone, then content, then the finish reason alone.
def _chat_chunks(
    content: dict[str, Any], finish: FinishReason | None, first: bool
) -> Iterator[dict[str, Any]]:
    nothing = {"logprobs": None, **_finish(None)}
    if first:
        yield {"delta": {"role": "assistant", "content": ""}, **nothing}
    logprobs = content["logprobs"]
    if content["text"] or (logprobs and logprobs["content"]):
        yield {"delta": {"content": content["text"]}, **nothing, "logprobs": logprobs}
    if finish is not None:
        yield {"delta": {}, **nothing, **_finish(finish)}


def _completion_chunks(
    content: dict[str, Any], finish: FinishReason | None, first: bool
) -> Iterator[dict[str, Any]]:
    if content["text"] or content["logprobs"] or finish or first:
        yield {**content, **_finish(finish)}


# `matched_stop` is the id or the string that ended the choice, else null.
def _finish(finish: FinishReason | None) -> dict[str, Any]:
    return {"finish_reason": finish and finish.type, "matched_stop": finish and finish.matched}
