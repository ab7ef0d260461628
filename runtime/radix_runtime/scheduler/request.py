"""One choice of one request, from arrival to release.

    cached_len <= computed_len <= total_len

- `cached_len`   tokens whose pages belong to the tree, which this request keeps locked at `node`;
                 whole pages.
- `computed_len` tokens whose KV is written by the steps launched so far.
- `total_len`    prompt and sampled tokens, with those sampled by a step whose result the host has
                 not seen yet; `num_ids` counts the ids that it has seen.

The next step always computes tokens from `computed_len` on: all that is missing (prefill), a part
of it (chunk), or the one token sampled last (decode).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvariantViolation
from ..messages import Generate, Logprobs, unpack_ids

if TYPE_CHECKING:
    from ..memory.radix_cache import Node


class State(Enum):
    WAITING = auto()  # in the queue; owns nothing
    PREFILL = auto()  # has a row; its known tokens are not all computed
    DECODE = auto()  # has a row; its next input token lies on the device
    DRAINING = auto()  # ended; waits for the last step that contains it
    DONE = auto()


_NEXT = {
    State.WAITING: {State.PREFILL, State.DONE},
    State.PREFILL: {State.DECODE, State.WAITING, State.DRAINING},
    State.DECODE: {State.WAITING, State.DRAINING},
    State.DRAINING: {State.DONE},
    State.DONE: set(),
}


class LogprobBuffer:
    """Logprobs that were not sent yet, one entry a token."""

    def __init__(self, top_n: int) -> None:
        self.top_n = top_n
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._top_ids: list[np.ndarray] = []
        self._top_values: list[np.ndarray] = []

    def add(
        self,
        ids: np.ndarray,
        values: np.ndarray,
        top_ids: np.ndarray | None = None,
        top_values: np.ndarray | None = None,
    ) -> None:
        """`ids`, `values` [n]; `top_ids`, `top_values` [n, at least top_n]; None: there are no
        alternatives, which reads as id -1 and NaN."""
        shape = (len(ids), self.top_n)
        top_ids = np.full(shape, -1, np.int32) if top_ids is None else top_ids
        top_values = np.full(shape, np.nan, np.float32) if top_values is None else top_values
        self._ids.append(ids)
        self._values.append(values)
        self._top_ids.append(top_ids[:, : self.top_n].reshape(-1))
        self._top_values.append(top_values[:, : self.top_n].reshape(-1))

    def take(self) -> Logprobs | None:
        """Everything since the last call, or None."""
        if not self._ids:
            return None
        parts = (self._ids, self._values, self._top_ids, self._top_values)
        types = ("<i4", "<f4", "<i4", "<f4")
        data = [
            np.concatenate(part).astype(dtype, copy=False).tobytes() for part, dtype in zip(parts, types, strict=True)
        ]
        for part in parts:
            part.clear()
        return Logprobs(data[0], data[1], self.top_n, data[2], data[3])


class Request:
    """Plain state; the transitions that move pages live in `lifecycle.py`."""

    __slots__ = (  # noqa: RUF023
        "source", "params", "rid", "choice", "seq", "arrival", "deadline", "extra_key",
        "prompt_len", "max_total_len", "stop_ids", "seed", "send_every",
        "_ids", "num_ids", "state", "cached_len", "computed_len", "total_len", "prefill_end",
        "row", "num_pages", "node", "last_step", "keep_len", "poisoned", "retractions",
        "cached_tokens", "sent", "started", "ended", "prefix_hint",
        "logprobs", "prompt_logprobs", "logprob_next",
    )  # fmt: skip

    def __init__(
        self,
        source: Generate,
        choice: int,
        seq: int,
        *,
        arrival: float,
        seed: int,
        max_total_len: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.source = source
        self.params = source.sampling
        self.rid = source.rid
        self.choice = choice
        self.seq = seq  # order of arrival; also decides who is retracted first
        self.arrival = arrival
        self.deadline = source.deadline
        self.extra_key = source.extra_key
        prompt = unpack_ids(source.input_ids)
        self.prompt_len = len(prompt)
        self.max_total_len = max_total_len
        self.stop_ids = stop_ids
        self.seed = seed
        # A stop string must be looked for after each token; nobody reads the rest before the end.
        self.send_every = 1 if source.stream or source.sampling.stop else 64

        self._ids = prompt  # read-only until the first append
        self.num_ids = self.prompt_len
        self.state = State.WAITING
        self.cached_len = self.computed_len = 0
        self.total_len = self.prefill_end = self.prompt_len
        self.row = -1
        self.num_pages = 0
        self.node: Node | None = None
        self.last_step = -1  # newest launched step that contains this request
        self.keep_len: int | None = None  # tokens that count, when a stop string ended it earlier
        self.poisoned = False  # its KV must not be shared
        self.retractions = 0

        self.cached_tokens = -1  # not computed at first admission; -1: never admitted
        self.sent = 0  # output tokens that went out
        self.started = False  # the first delta went out
        self.ended = False  # its last message went out; nothing follows
        self.prefix_hint = (-1, 0)  # (cache version, match length), for ordering only

        start = source.logprob_start if choice == 0 else -1
        self.logprobs = LogprobBuffer(source.top_logprobs) if source.return_logprob else None
        self.prompt_logprobs = LogprobBuffer(source.top_logprobs) if start >= 0 else None
        self.logprob_next = start if start >= 0 else self.prompt_len  # next position to score
        if self.prompt_logprobs is not None and start == 0:  # the first token follows nothing
            self.prompt_logprobs.add(prompt[:1], np.full(1, np.nan, np.float32))

    def move(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise InvariantViolation("I5", f"{self.rid}: {self.state.name} -> {state.name}")
        self.state = state

    @property
    def ids(self) -> np.ndarray:
        """int32 [num_ids], a view: the prompt and every sampled token the host knows."""
        return self._ids[: self.num_ids]

    @property
    def num_output(self) -> int:
        return self.num_ids - self.prompt_len

    def append(self, token: int) -> None:
        if self.num_ids == len(self._ids) or not self._ids.flags.writeable:
            room = min(self.max_total_len - self.num_ids, max(64, self.num_ids // 2))
            self._ids = np.concatenate([self.ids, np.zeros(room, np.int32)])
        self._ids[self.num_ids] = token
        self.num_ids += 1

    @property
    def wants_token(self) -> bool:
        """The next token to compute is the one sampled last, and another may follow it."""
        return self.state is State.DECODE and self.total_len < self.max_total_len

    @property
    def match_limit(self) -> int:
        """Longest prefix that may come from the cache: one token is left to compute, and the row
        before the first prompt position still to be scored."""
        limit = self.total_len - 1
        if self.logprob_next < self.prompt_len:
            limit = min(limit, max(self.logprob_next - 1, 0))
        return limit

    @property
    def shareable_len(self) -> int:
        """Tokens whose KV may enter the tree once every step that contains the request is done.
        The last token's KV never does, whether or not a later step happened to compute it: so
        the tree is the same with overlap on and off."""
        known = self.num_ids if self.keep_len is None else min(self.num_ids, self.keep_len)
        return min(self.computed_len, max(known - 1, 0))
