"""One choice of one request, from arrival to release."""

#     cached_len <= computed_len <= total_len
#
# The next step always computes tokens from `computed_len` on: all that is missing (prefill), a part
# of it (chunk), or the one token sampled last (decode).

from enum import Enum, auto

import numpy as np

from ..errors import require
from ..memory.radix_cache import Node
from ..messages import Generate, Logprobs, unpack_ids


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
        self._parts: list[tuple[np.ndarray, ...]] = []

    def add(
        self,
        ids: np.ndarray,
        values: np.ndarray,
        top_ids: np.ndarray | None,
        tops: np.ndarray | None,
    ) -> None:
        """`ids`, `values` [n]; alternatives [n, at least top_n], or None: id -1 and NaN."""
        none = (len(ids), self.top_n)
        top_ids = np.full(none, -1) if top_ids is None else top_ids[:, : self.top_n]
        tops = np.full(none, np.nan) if tops is None else tops[:, : self.top_n]
        self._parts.append((ids, values, top_ids.ravel(), tops.ravel()))

    def take(self) -> Logprobs | None:
        if not self._parts:
            return None
        columns = zip(zip(*self._parts, strict=True), ("<i4", "<f4", "<i4", "<f4"), strict=True)
        ids, values, *top = (
            np.concatenate(column).astype(dtype).tobytes() for column, dtype in columns
        )
        self._parts.clear()
        return Logprobs(ids, values, self.top_n, *top)


class Request:
    """Plain state; the transitions that move pages live in `lifecycle.py`."""

    # `seq` is the order of arrival; the last that came is retracted first.
    def __init__(
        self, source: Generate, choice: int, seq: int, arrival: float, seed: int, max_total_len: int,
        stop_ids: frozenset[int],
    ) -> None:  # fmt: skip
        self.source, self.choice, self.seq, self.arrival, self.seed = (
            source,
            choice,
            seq,
            arrival,
            seed,
        )
        self.rid, self.params, self.extra_key = source.rid, source.sampling, source.extra_key
        self.max_total_len, self.stop_ids, self.state = max_total_len, stop_ids, State.WAITING
        self._ids = unpack_ids(source.input_ids)  # read-only until the first append
        # Ids that the host has seen; `total_len` counts those too that a step has sampled and the
        # host has not seen.
        self.num_ids = self.prompt_len = self.total_len = len(self._ids)
        self.prefill_end = self.prompt_len  # total_len at the last admission
        # `computed_len`: tokens whose KV is written by the steps launched so far. `cached_len`:
        # tokens whose pages belong to the tree, which this request keeps locked at `node`; whole
        # pages.
        self.cached_len = self.computed_len = 0
        self.row, self.num_pages = -1, 0
        self.node: Node | None = None
        self.last_step = -1  # newest launched step that contains this request
        self.keep_len: int | None = None  # tokens that count, when a stop string ended it earlier
        self.poisoned = False  # its KV must not be shared
        self.retractions = 0
        self.prefix_hint = (-1, 0)  # (cache version, match length), for ordering only

        self.cached_tokens = -1  # not computed at first admission; -1: never admitted
        self.sent = 0  # output tokens that went out
        self.started = False  # the first delta went out
        self.ended = False  # its last message went out; nothing follows
        self.logprobs = LogprobBuffer(source.top_logprobs) if source.return_logprob else None
        self.prompt_logprobs: LogprobBuffer | None = None
        self.logprob_next = self.prompt_len  # next prompt position to score
        if choice == 0 and source.logprob_start >= 0:
            self.prompt_logprobs = LogprobBuffer(source.top_logprobs)
            self.logprob_next = source.logprob_start
            if source.logprob_start == 0:  # the first token follows nothing
                self.prompt_logprobs.add(self._ids[:1], np.full(1, np.nan), None, None)

    def move(self, state: State) -> None:
        require(state in _NEXT[self.state], "I5", f"{self.rid}: {self.state.name} -> {state.name}")
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
    def match_limit(self) -> int:
        """Longest prefix to take from the cache: what is to be scored is left to compute, of a
        prompt two tokens."""
        if self.logprob_next < self.prompt_len:
            return max(self.logprob_next - 1, 0)
        return (
            max(self.total_len - 2, 0) if self.total_len == self.prompt_len else self.total_len - 1
        )

    @property
    def shareable_len(self) -> int:
        """Tokens whose KV may enter the tree once every step that contains the request is done."""
        # The last token's never does, even if a later step has computed it: the tree is the same
        # with overlap or not.
        known = self.num_ids if self.keep_len is None else min(self.num_ids, self.keep_len)
        return min(self.computed_len, max(known - 1, 0))
