"""The way of a call that generates: admitted requests in, their output back, whole or as events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import __version__
from ..messages import FinishReason, Generate, TextDelta, pack_ids
from ..sampling_params import SamplingParams
from .admission import admit
from .exchange import Exchange
from .logprobs import TokenNames
from .protocol import NativeBody, NativeSampling, OpenAIBody, StreamOptions
from .responses import DONE, event, to_json
from .submission import Batch
from .tokenizer_manager import TokenizerManager, new_id


def new_request(
    manager: TokenizerManager,
    body: OpenAIBody | NativeSampling,
    ids: Sequence[int],
    *,
    prompt_param: str,
    names: Mapping[str, str],
    max_new_tokens: int | None,
    **fields: Any,
) -> Generate:
    """A request that fits, its rid still empty. `max_new_tokens` holds if the client says nothing
    and is lowered to what fits. Raises RequestError."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    given = {name: getattr(body, name) for name in SamplingParams.__struct_fields__}
    for name, value in [*manager.sampling_defaults.items(), *given.items()]:
        if value is not None:
            setattr(sampling, name, value)
    if isinstance(body.stop, str):
        sampling.stop = [body.stop]
    clip = body.max_new_tokens is None
    sampling = admit(ids, sampling, manager.limits, prompt_param=prompt_param, names=names, clip=clip)
    return Generate("", pack_ids(ids), sampling, **fields)


class Answer(ABC):
    """What goes back for one call; a route shapes it."""

    def __init__(self, exchange: Exchange, body: OpenAIBody | NativeBody, requests: list[Generate], name: str) -> None:
        self.exchange = exchange
        self.requests = requests
        self.name = name
        self.request_of = [r for r in requests for _ in range(r.sampling.n)]  # by choice
        self._stream = bool(body.stream)
        # Requests share cached prefixes only under the same key.
        key = "\x1f".join(part for part in (body.cache_salt, body.extra_key) if part)
        for request in requests:
            request.stream = self._stream
            request.extra_key = key or None

    async def send(self) -> None:
        """Runs the requests. Raises RequestError."""
        exchange = self.exchange
        submit = exchange.manager.submit
        with submit(self.requests, name=self.name, started=exchange.started) as submission:
            if not self._stream:
                await exchange.answer(self.whole(await submission.collect()))
                return
            while batch := await submission.next_batch():
                if frames := self.frames(batch):
                    await exchange.write(frames)
            await exchange.write(self.tail() + DONE, last=True)

    @abstractmethod
    def whole(self, deltas: list[TextDelta]) -> Any: ...

    @abstractmethod
    def frames(self, batch: Batch) -> bytes: ...

    def tail(self) -> bytes:
        """The frame between the last of a choice and [DONE]."""
        return b""


class OpenAIAnswer(Answer):
    """What chat and completions share. A prompt counts once in the usage, however many choices it
    has."""

    def __init__(self, exchange: Exchange, body: OpenAIBody, requests: list[Generate], kind: str, prefix: str) -> None:
        super().__init__(exchange, body, requests, body.rid or new_id(prefix))
        self.names = TokenNames(exchange.manager.tokenizer, requests[0].sampling)
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
        self._prefix = b"data: " + to_json(self._head)[:-1] + b',"choices":['

    @abstractmethod
    def choice(self, choice: int, delta: TextDelta) -> dict[str, Any]:
        """The whole choice, less index and finish reason."""

    @abstractmethod
    def chunks(self, choice: int, delta: TextDelta, first: bool) -> Iterable[bytes]:
        """JSON of the chunk choices that `delta` gives."""

    def whole(self, deltas: list[TextDelta]) -> dict[str, Any]:
        self._count(enumerate(deltas))
        choices = [{"index": i, **self.choice(i, delta), **finish_of(delta.finish)} for i, delta in enumerate(deltas)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def frames(self, batch: Batch) -> bytes:
        self._count(batch.items())
        frames = b""
        for choice, delta in batch.items():
            for chunk in self.chunks(choice, delta, choice not in self._started):
                frames += self._prefix + chunk + self._frame_end() + b"}\n\n"
            self._started.add(choice)
        return frames

    def tail(self) -> bytes:
        if not self._options.include_usage:
            return b""
        return event({**self._head, "choices": [], "usage": self._usage()})

    def _frame_end(self) -> bytes:
        end = b"]"
        if self._options.continuous_usage_stats:
            end += b',"usage":' + to_json(self._usage())
        elif self._options.include_usage:
            end += b',"usage":null'
        if self.exchange.warnings:
            end += b',"warnings":' + to_json(self.exchange.warnings)
            self.exchange.warnings = []  # only in the first frame
        return end

    def _count(self, deltas: Iterable[tuple[int, TextDelta]]) -> None:
        for choice, delta in deltas:
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


def finish_of(finish: FinishReason | None) -> dict[str, Any]:
    """`matched_stop` is the id or the string that ended the choice, else null."""
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish.type, "matched_stop": finish.matched}
