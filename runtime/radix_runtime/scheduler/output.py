"""What clients get: tokens become deltas, the deltas of a step mostly one TokenBatch."""

import numpy as np

from ..messages import (
    CONTEXT_TOKENS,
    FinishReason,
    Outbox,
    TokenBatch,
    TokenDelta,
    batches,
    pack_ids,
    slice_ids,
)
from ..step_plan import StepResult
from .request import Request

_BLOCK = 64  # tokens that travel together when nobody reads before the end


def finish_reason(request: Request, token: int | None) -> FinishReason | None:
    """Why the request ends with `token`, its newest; None: it goes on. `token` is None if it asked
    for none."""
    if token in request.stop_ids and request.num_output > request.params.min_new_tokens:
        return FinishReason("stop", matched=token)
    return FinishReason("length") if request.num_ids >= request.max_total_len else None


def record_logprobs(request: Request, token: int, result: StepResult, slot: int) -> None:
    if request.logprobs is not None and result.logprobs is not None:
        one = slice(slot, slot + 1)
        top = (
            None if part is None else part[one] for part in (result.top_ids, result.top_logprobs)
        )
        request.logprobs.add(np.array([token]), result.logprobs[one], *top)


class Output:
    """The only sender of results."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._deltas: list[TokenDelta] = []

    def add(self, request: Request, reason: FinishReason | None) -> None:
        """What was not sent yet: the first token and the end at once, others in blocks if nobody
        waits for each."""
        first, new = not request.started, request.ids[request.prompt_len + request.sent :]
        together = 1 if request.source.stream or request.params.stop else _BLOCK
        if reason is None and not first and len(new) < together:
            return
        request.started = True
        request.sent += len(new)
        sizes = max(request.cached_tokens, 0), request.num_output
        own, prompt = (
            part.take() if part else None for part in (request.logprobs, request.prompt_logprobs)
        )
        delta = TokenDelta(request.rid, request.choice, pack_ids(new), reason, *sizes, own, prompt)
        if first:
            delta.sampling, delta.input_ids = (
                request.params,
                slice_ids(request.source.input_ids, -CONTEXT_TOKENS),
            )
        self._deltas.append(delta)

    def flush(self) -> None:
        for batch in batches(self._deltas):
            self._outbox.send(TokenBatch(batch))
        self._deltas = []
