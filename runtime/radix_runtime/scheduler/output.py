"""What clients get: tokens become deltas, deltas become one TokenBatch a step.

`Output` is the only sender of results. It owns the cursors `sent`, `started` and `ended` of a
request; after `ended` nothing leaves for it.
"""

from __future__ import annotations

import numpy as np

from ..messages import FinishReason, TokenBatch, TokenDelta, pack_ids
from ..step_plan import StepResult
from .channel import Outbox
from .request import Request


def finish_reason(request: Request, token: int | None) -> FinishReason | None:
    """Why the request ends with `token`, its newest (None: it asked for none): a stop id once
    there are more than `min_new_tokens`, or the length. None: it goes on."""
    if token in request.stop_ids and request.num_output > request.params.min_new_tokens:
        return FinishReason("stop", matched=token)
    return FinishReason("length") if request.num_ids >= request.max_total_len else None


def record_logprobs(request: Request, token: int, result: StepResult, slot: int) -> None:
    """Keeps the logprobs of the token in entry `slot` of the result."""
    if request.logprobs is None or result.logprobs is None:
        return
    one = slice(slot, slot + 1)
    top_ids = None if result.top_ids is None else result.top_ids[one]
    top_values = None if result.top_logprobs is None else result.top_logprobs[one]
    request.logprobs.add(np.array([token], np.int32), result.logprobs[one], top_ids, top_values)


class Output:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._deltas: list[TokenDelta] = []

    def token(self, request: Request) -> None:
        """A token was appended: the first goes out at once, later ones every `send_every`."""
        unsent = request.num_output - request.sent
        if not request.started or unsent >= request.send_every:
            self._emit(request, None)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """The last delta of a choice, with all that was not sent yet."""
        self._emit(request, reason)
        request.ended = True

    def _emit(self, request: Request, reason: FinishReason | None) -> None:
        first = not request.started
        request.started = True
        new = request.ids[request.prompt_len + request.sent :]
        request.sent += len(new)
        delta = TokenDelta(
            rid=request.rid,
            choice=request.choice,
            ids=pack_ids(new),
            finish=reason,
            prompt_tokens=request.prompt_len,
            cached_tokens=max(request.cached_tokens, 0),
            completion_tokens=request.num_output,
            logprobs=request.logprobs.take() if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs.take() if request.prompt_logprobs else None,
            sampling=request.params if first else None,
            input_ids=request.source.input_ids if first else None,
        )
        self._deltas.append(delta)

    def flush(self) -> None:
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            self._outbox.send(TokenBatch(deltas))
