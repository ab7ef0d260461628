"""What clients get: the tokens of a step, of all streams at once, and deltas of the others."""

import numpy as np

from ..channel import Outbox
from ..errors import RequestError
from ..messages import (
    CONTEXT_TOKENS,
    FinishReason,
    Generate,
    RequestFailed,
    StreamTokens,
    TokenBatch,
    TokenDelta,
    batches,
    pack_ids,
    slice_ids,
)
from .request import Request
from .rows import BLOCK, Flag, Rows


class Output:
    """The only sender of tokens and errors. Deltas are kept until `flush`; an error sends first
    what came before it."""

    def __init__(self, outbox: Outbox, rows: Rows) -> None:
        self._outbox = outbox
        self._rows = rows
        self._tokens: StreamTokens | None = None  # go out before the deltas
        self._deltas: list[TokenDelta] = []

    def add_rows(self, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> None:
        """What `add` does, for rows that go on and have just been given `counts[i]` of `tokens`;
        none has log-probabilities."""
        numbers = self._rows
        flags = numbers.flags[rows]
        gathering = rows[:0]
        if np.count_nonzero(flags):
            streamed = (flags & Flag.IN_BLOCKS) == 0
            gathering = rows[~streamed]
            tokens = tokens[np.repeat(streamed, counts)]
            counts = counts[streamed]
            rows = rows[streamed]
        if len(rows):
            if self._tokens is not None or self._deltas:
                self.flush()
            numbers.sent[rows] = numbers.num_ids[rows] - numbers.prompt_len[rows]
            self._tokens = StreamTokens.pack(numbers.seq[rows], counts, tokens)
        if len(gathering):
            unsent = numbers.num_ids[gathering] - numbers.prompt_len[gathering]
            unsent -= numbers.sent[gathering]
            for row in gathering[unsent >= BLOCK].tolist():
                self.add(numbers.request(row), None)

    def add(self, request: Request, reason: FinishReason | None) -> None:
        """What was not sent yet: the first token and the end at once, others in blocks if nobody
        waits for each."""
        first = not request.started
        new = request.ids[request.prompt_len + request.sent :]
        together = 1 if request.is_streamed else BLOCK
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
            delta.queue_seconds = request.queue_seconds
            delta.stream = request.seq
            delta.api = request.source.api
            delta.sampling = request.params
            delta.input_ids = slice_ids(request.source.input_ids, -CONTEXT_TOKENS)
        self._deltas.append(delta)

    def fail(self, request: Generate, error: RequestError) -> None:
        """The answer to a request that was refused or has failed."""
        self.flush()
        self._outbox.send(RequestFailed.of(request.rid, error, request.api))

    def flush(self) -> None:
        """Sends what was added since the last time."""
        tokens = self._tokens
        self._tokens = None
        for batch in batches(self._deltas):
            self._outbox.send(TokenBatch(batch, tokens))
            tokens = None
        self._deltas = []
        if tokens is not None:
            self._outbox.send(TokenBatch([], tokens))
