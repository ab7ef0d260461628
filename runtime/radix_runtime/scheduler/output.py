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

_NONE_I = np.zeros((1, 0), np.int32)
_NONE_F = np.zeros((1, 0), np.float32)


def finish_reason(request: Request) -> FinishReason | None:
    """Why the request ends with the token it got last, or None: a stop id once `min_new_tokens`
    are there, or the length."""
    if request.num_output > request.params.min_new_tokens:
        token = int(request.ids[-1])
        if token in request.stop_ids:
            return FinishReason("stop", matched=token)
    if request.num_ids >= request.max_total_len:
        return FinishReason("length")
    return None


def record_logprobs(request: Request, token: int, result: StepResult, slot: int) -> None:
    """Keeps the logprobs of the token in entry `slot` of the result."""
    if request.logprobs is None or result.logprobs is None:
        return
    has_top = result.top_ids is not None and result.top_logprobs is not None
    top_ids = result.top_ids[slot : slot + 1] if has_top else _NONE_I  # type: ignore[index]
    top_values = result.top_logprobs[slot : slot + 1] if has_top else _NONE_F  # type: ignore[index]
    values = result.logprobs[slot : slot + 1]
    request.logprobs.add(np.array([token], np.int32), values, top_ids, top_values)


def record_prompt_logprobs(
    request: Request, targets: np.ndarray, values: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """Keeps one block of prompt logprobs; `targets` int32 are the tokens that were scored."""
    assert request.prompt_logprobs is not None
    request.prompt_logprobs.add(targets, *values)


def start_prompt_logprobs(request: Request) -> None:
    """The first token of a prompt follows nothing: its logprob is NaN, its alternatives -1."""
    buffer = request.prompt_logprobs
    if buffer is None or request.source.logprob_start != 0:
        return
    top = (1, buffer.top_n)
    nan = np.full(1, np.nan, np.float32)
    buffer.add(request.ids[:1], nan, np.full(top, -1, np.int32), np.full(top, np.nan, np.float32))


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
