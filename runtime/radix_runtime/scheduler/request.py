"""One choice of one request, from arrival to release."""

#     cached_len <= computed_len <= total_len
#
# The next step always computes tokens from `computed_len` on: all that is missing (prefill), a part
# of it (chunk), or what was sampled last (decode).
#
# A decode entry samples up to `max_samples` tokens, and how many are accepted only its result
# tells. Until then `computed_len` and `total_len` count all of them: both are upper bounds while
# such a step is in flight, and sink together by what was not accepted.

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto

import numpy as np

from ..errors import require
from ..memory.radix_node import Node
from ..messages import Generate, unpack_ids
from ..sampling_params import SamplingParams
from ..step_plan import NO_STEP
from .columns import Column, Number
from .logprobs import LogprobBuffer


class State(Enum):
    """Where a request stands. Until PREFILL it owns neither a row nor a page."""

    PENDING = auto()  # accepted; waits for something outside of the engine
    WAITING = auto()  # in the queue
    PREFILL = auto()  # has a row; its known tokens are not all computed
    DECODE = auto()  # has a row; its next input token lies on the device
    DRAINING = auto()  # ended; waits for the last step that contains it
    DONE = auto()


_NEXT = {
    State.PENDING: {State.WAITING, State.DONE},
    State.WAITING: {State.PREFILL, State.DONE},
    State.PREFILL: {State.DECODE, State.WAITING, State.DRAINING},
    State.DECODE: {State.WAITING, State.DRAINING},
    State.DRAINING: {State.DONE},
    State.DONE: set(),
}


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Plain state; the transitions that move pages live in `lifecycle.py`.

    The prompt, the ids sampled so far and the three lengths say all that a step needs to know. What
    every step changes lies in columns while the request has a row (`rows.py`), where a step reads
    and writes it for all rows at once; the attributes here read and write the same numbers."""

    source: Generate
    choice: int  # index among the n choices of `source`
    _: KW_ONLY
    seq: int  # order of arrival; the last that came is retracted first
    arrival: float  # time of the scheduler's clock in seconds
    seed: int  # 64 bits, unsigned
    max_total_len: int  # the most tokens of prompt and output together
    stop_ids: frozenset[int]

    rid: str = field(init=False)
    params: SamplingParams = field(init=False)
    extra_key: Hashable = field(init=False)
    state: State = State.PENDING

    # What steps change, int64 [Column]: a view of the columns of `Rows` while it has a row.
    numbers: np.ndarray = field(init=False)
    num_ids = Number(Column.NUM_IDS)  # ids that the host has seen
    # `num_ids` and the tokens that steps in flight sample: at most so many, see above.
    total_len = Number(Column.TOTAL_LEN)
    computed_len = Number(Column.COMPUTED_LEN)  # with KV by the steps launched so far, at most
    reserved_len = Number(Column.RESERVED_LEN)  # highest computed_len since admission: has pages
    num_pages = Number(Column.NUM_PAGES)
    last_step = Number(Column.LAST_STEP)  # newest launched step that contains this request
    sent = Number(Column.SENT)  # output tokens that went out

    # Tokens.
    prompt_len: int = field(init=False)
    prefill_end: int = field(init=False)  # total_len at the last admission
    # Tokens whose pages belong to the tree, which this request keeps locked at `node`; whole pages.
    cached_len: int = 0
    keep_len: int | None = None  # tokens that count, when a stop string ended it earlier

    # What it holds.
    row: int = -1
    node: Node | None = None

    poisoned: bool = False  # its KV must not be shared
    retractions: int = 0
    prefix_hint: tuple[int, int] = (-1, 0)  # (cache version, match length), for ordering only

    # What the client has got.
    cached_tokens: int = -1  # not computed at first admission; -1: never admitted
    queue_seconds: float | None = None  # from arrival to first admission
    started: bool = False  # the first delta went out
    ended: bool = False  # its last message went out; nothing follows
    logprobs: LogprobBuffer | None = None
    prompt_logprobs: LogprobBuffer | None = None
    logprob_next: int = field(init=False)  # next prompt position to score

    # The first `_num_settled` ids, int32, with room; read-only until the first append. Those after
    # them are in `recent`, the row's part of `Rows.recent`.
    _ids: np.ndarray = field(init=False)
    _num_settled: int = field(init=False)
    recent: np.ndarray | None = None

    def __post_init__(self) -> None:
        source = self.source
        self.rid = source.rid
        self.params = source.sampling
        self.extra_key = source.extra_key
        self._ids = unpack_ids(source.input_ids)
        self.prompt_len = len(self._ids)
        self.prefill_end = self.prompt_len
        self._num_settled = self.prompt_len
        self.numbers = np.zeros(len(Column), np.int64)
        self.numbers[Column.SEQ] = self.seq
        self.numbers[Column.PROMPT_LEN] = self.prompt_len
        self.numbers[Column.MAX_TOTAL_LEN] = self.max_total_len
        self.num_ids = self.prompt_len
        self.total_len = self.prompt_len
        self.last_step = NO_STEP
        self.logprob_next = self.prompt_len
        if source.return_logprob:
            self.logprobs = LogprobBuffer(source.top_logprobs)
        if self.choice == 0 and source.logprob_start >= 0:
            self._score_prompt(source.logprob_start)

    def _score_prompt(self, start: int) -> None:
        has_ranks = self.source.prompt_logprobs is not None
        self.prompt_logprobs = LogprobBuffer(self.source.prompt_top, has_ranks=has_ranks)
        self.logprob_next = start
        if start == 0:  # the first token follows nothing
            self.prompt_logprobs.add(self._ids[:1], np.full(1, np.nan))

    def move(self, state: State) -> None:
        """Raises InvariantViolation (I5) for a transition that does not exist."""
        require(state in _NEXT[self.state], "I5", f"{self.rid}: {self.state.name} -> {state.name}")
        self.state = state

    @property
    def ids(self) -> np.ndarray:
        """int32 [num_ids], a view: the prompt and every sampled token the host knows."""
        num_ids = self.num_ids
        if self._num_settled < num_ids:
            self.settle()
        return self._ids[:num_ids]

    @property
    def is_streamed(self) -> bool:
        """Whether somebody waits for each token: a client, or who looks for stop strings."""
        return self.source.stream or bool(self.params.stop)

    @property
    def num_output(self) -> int:
        return self.num_ids - self.prompt_len

    @property
    def held_back(self) -> int:
        """How many output tokens come before a stop id may be drawn. The masks of a constrained
        answer see to that themselves, as far as its grammar lets them."""
        return 0 if self.source.constraint is not None else self.params.min_new_tokens

    def append(self, token: int) -> None:
        """One sampled token more."""
        self.settle()
        self._settle_more(np.array([token], np.int32))
        self.num_ids += 1

    def settle(self) -> None:
        """Takes the tokens over that were appended to its row (`Rows.append`)."""
        left = self.num_ids - self._num_settled
        if self.recent is None or left == 0:
            return
        tokens = self.recent[self._num_settled % len(self.recent) :][:left]
        self._settle_more(tokens)
        if len(tokens) < left:  # they go on at the beginning
            self._settle_more(self.recent[: left - len(tokens)])

    def _settle_more(self, tokens: np.ndarray) -> None:
        start = self._num_settled
        end = start + len(tokens)
        if end > len(self._ids) or not self._ids.flags.writeable:
            room = max(end, min(self.max_total_len, start + max(64, start // 2)))
            grown = np.zeros(room, np.int32)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start:end] = tokens
        self._num_settled = end

    @property
    def match_limit(self) -> int:
        """The longest prefix to take from the cache: what is to be scored is left to compute, and
        of a prompt the last two tokens."""
        if self.logprob_next < self.prompt_len:
            return max(self.logprob_next - 1, 0)
        if self.total_len == self.prompt_len:
            return max(self.total_len - 2, 0)
        return self.total_len - 1

    @property
    def shareable_len(self) -> int:
        """Tokens whose KV may enter the tree once every step that contains the request is done."""
        # The last token's never does, even if a later step has computed it: the tree is the same
        # with overlap or not.
        known = self.num_ids
        if self.keep_len is not None:
            known = min(known, self.keep_len)
        return min(self.computed_len, max(known - 1, 0))
