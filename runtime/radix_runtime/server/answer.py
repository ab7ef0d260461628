"""The way of a call that generates: admitted requests in, their output back, whole or as events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages import Generate, TextDelta, pack_ids
from ..sampling_params import SamplingParams
from .admission import admit, sampling_params
from .exchange import Exchange
from .protocol import NativeBody, NativeSampling, OpenAIBody
from .tokenizer_manager import Batch


def new_request(
    exchange: Exchange,
    body: OpenAIBody | NativeSampling,
    ids: Sequence[int],
    prompt_param: str,
    names: Mapping[str, str],
    max_new_tokens: int | None,
    **fields: Any,
) -> Generate:
    """A request that fits, its rid still empty. `max_new_tokens` holds if the client says nothing and is lowered to
    what fits. Raises RequestError."""
    manager = exchange.manager
    fields_of = ((name, getattr(body, name)) for name in SamplingParams.__struct_fields__)
    given = {name: value for name, value in fields_of if value is not None}
    sampling = sampling_params(given, {"max_new_tokens": max_new_tokens, **manager.sampling_defaults})
    clip = "max_new_tokens" not in given
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
            await exchange.write(self.tail() + b"data: [DONE]\n\n", last=True)

    @abstractmethod
    def whole(self, deltas: list[TextDelta]) -> Any: ...

    @abstractmethod
    def frames(self, batch: Batch) -> bytes: ...

    def tail(self) -> bytes:
        """The frame between the last of a choice and [DONE]."""
        return b""
