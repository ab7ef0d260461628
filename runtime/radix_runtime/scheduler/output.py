"""What clients get: tokens become deltas, the deltas of a step mostly one TokenBatch."""

from ..errors import RequestError
from ..messages import (
    CONTEXT_TOKENS,
    FinishReason,
    Outbox,
    RequestFailed,
    TokenBatch,
    TokenDelta,
    batches,
    pack_ids,
    slice_ids,
)
from .request import Request

_BLOCK = 64  # tokens that travel together when nobody reads before the end


class Output:
    """The only sender of tokens and errors. Deltas are kept until `flush`; an error sends first
    what came before it."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._deltas: list[TokenDelta] = []

    def add(self, request: Request, reason: FinishReason | None) -> None:
        """What was not sent yet: the first token and the end at once, others in blocks if nobody
        waits for each."""
        first = not request.started
        new = request.ids[request.prompt_len + request.sent :]
        together = 1 if request.source.stream or request.params.stop else _BLOCK
        if reason is None and not first and len(new) < together:
            return
        request.started = True
        request.sent += len(new)
        delta = TokenDelta(
            rid=request.rid,
            choice=request.choice,
            ids=pack_ids(new),
            finish=reason,
            cached_tokens=max(request.cached_tokens, 0),
            completion_tokens=request.num_output,
        )
        if request.logprobs is not None:
            delta.logprobs = request.logprobs.take()
        if request.prompt_logprobs is not None:
            delta.prompt_logprobs = request.prompt_logprobs.take()
        if first:
            delta.sampling = request.params
            delta.input_ids = slice_ids(request.source.input_ids, -CONTEXT_TOKENS)
        self._deltas.append(delta)

    def fail(self, rid: str, error: RequestError) -> None:
        """The answer to a request that was refused or has failed."""
        self.flush()
        self._outbox.send(RequestFailed.of(rid, error))

    def flush(self) -> None:
        for batch in batches(self._deltas):
            self._outbox.send(TokenBatch(batch))
        self._deltas = []
