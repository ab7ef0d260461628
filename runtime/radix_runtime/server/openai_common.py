"""What chat and completions share: the way of a call, parameters, usage, how a choice ends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from .. import __version__
from ..errors import refusal
from ..messages import FinishReason, TextDelta
from ..sampling_params import SamplingParams
from .exchange import Exchange
from .logprobs import TokenNames
from .protocol import OpenAIBody, Sampling
from .responses import event, to_json
from .submission import Submission
from .tokenizer_manager import Prompt, TokenizerManager, new_id

FINGERPRINT = f"radix-{__version__}"
_MAX_NAME = 256


def sampling_from(
    body: Sampling, defaults: Mapping[str, float | int], **values: Any
) -> SamplingParams:
    """SamplingParams of the fields that the client gave (not null), over `defaults`."""
    given = {name: getattr(body, name) for name in Sampling.__struct_fields__} | values
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    return SamplingParams(**{**defaults, **given})


def openai_sampling(
    body: OpenAIBody, defaults: Mapping[str, float | int], max_new_tokens: int | None
) -> SamplingParams:
    sampling = sampling_from(body, defaults, min_new_tokens=body.min_tokens)
    sampling.max_new_tokens = max_new_tokens
    sampling.no_stop_trim |= bool(body.include_stop_str_in_output)
    return sampling


def check_stream_options(body: OpenAIBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise refusal("invalid_combination", "stream_options needs stream", "stream_options")


def cache_key(body: Any) -> str | None:
    """Requests share cached prefixes only under the same key."""
    parts = [part for part in (body.cache_salt, body.extra_key) if part is not None]
    for name in ("cache_salt", "extra_key"):
        check_name(getattr(body, name), name)
    return "\x1f".join(parts) if parts else None


def check_name(value: str | None, param: str) -> None:
    if value is not None and not 1 <= len(value) <= _MAX_NAME:
        raise refusal("invalid_value", f"{param} must have 1 to {_MAX_NAME} characters", param)


def finish_of(finish: FinishReason | None) -> dict[str, Any]:
    """`matched_stop` is the id or the string that ended the choice, else null."""
    return {
        "finish_reason": None if finish is None else finish.type,
        "matched_stop": None if finish is None else finish.matched,
    }


class Answer:
    """What goes back for one call, whole or as chunks. A prompt counts once in the usage, however
    many choices it has."""

    def __init__(
        self, call: Call, submission: Submission, kind: str, model: str, warnings: list[str]
    ) -> None:
        body = call.body
        self._call = call
        self._submission = submission
        self._warnings = warnings
        self._cached: dict[int, int] = {}
        self._completion = [0] * len(submission.prompt_of)
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._head = {
            "id": submission.name,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._prefix = b"data: " + to_json(self._head)[:-1] + b',"choices":['

    def _count(self, deltas: Iterable[tuple[int, TextDelta]]) -> None:
        for choice, delta in deltas:
            # The first choice of a prompt to start tells what the cache gave to the prompt; the
            # others find it there by design.
            self._cached.setdefault(self._submission.prompt_of[choice], delta.cached_tokens)
            self._completion[choice] = delta.completion_tokens

    def _usage(self) -> dict[str, Any]:
        prompt, completion = sum(self._submission.prompt_lengths), sum(self._completion)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    async def whole(self, exchange: Exchange) -> None:
        deltas = await self._submission.collect()
        self._count(enumerate(deltas))
        choices = [
            {"index": i, **self._call.choice(i, delta), **finish_of(delta.finish)}
            for i, delta in enumerate(deltas)
        ]
        result = {**self._head, "choices": choices, "usage": self._usage()}
        if self._warnings:
            result["warnings"] = self._warnings
        await exchange.json(result)

    async def stream(self, exchange: Exchange) -> None:
        started: set[int] = set()
        while batch := await self._submission.next_batch():
            frames = b""
            self._count(batch.items())
            for choice, delta in batch.items():
                warn, first = not started, choice not in started
                started.add(choice)
                for chunk in self._call.chunks(choice, delta, first):
                    frames += self._frame(chunk, warn=warn)
                    warn = False
            if frames:
                await exchange.events.write(frames)
        tail = b""
        if self._include_usage:
            tail = event({**self._head, "choices": [], "usage": self._usage()})
        await exchange.events.done(tail)

    def _frame(self, choice: bytes, *, warn: bool) -> bytes:
        rest = b"]"
        if self._usage_always:
            rest += b',"usage":' + to_json(self._usage())
        elif self._include_usage:
            rest += b',"usage":null'
        if warn and self._warnings:
            rest += b',"warnings":' + to_json(self._warnings)
        return self._prefix + choice + rest + b"}\n\n"


class Call(Protocol):
    """One request of a route: its prompts, and its choices as the route shapes them."""

    body: OpenAIBody
    prompts: list[Prompt]

    def choice(self, choice: int, delta: TextDelta) -> dict[str, Any]:
        """The whole choice, less index and finish reason."""
        ...

    def chunks(self, choice: int, delta: TextDelta, first: bool) -> Iterable[bytes]:
        """JSON of the chunk choices that `delta` gives."""
        ...


async def answer_call(
    manager: TokenizerManager, exchange: Exchange, call: Call, kind: str, warnings: list[str]
) -> None:
    """Runs the prompts of `call` and sends what they give. Raises RequestError."""
    body = call.body
    check_name(body.rid, "rid")
    submission = manager.submit(
        call.prompts,
        name=body.rid or new_id("chatcmpl-" if kind.startswith("chat") else "cmpl-"),
        stream=bool(body.stream),
        extra_key=cache_key(body),
        started=exchange.started,
    )
    with submission:
        answer = Answer(call, submission, kind, manager.model_name, warnings)
        await (answer.stream(exchange) if body.stream else answer.whole(exchange))


def token_names(manager: TokenizerManager, sampling: SamplingParams) -> TokenNames:
    return TokenNames(
        manager.tokenizer,
        skip_special=sampling.skip_special_tokens,
        keeps_stop=sampling.no_stop_trim,
    )
