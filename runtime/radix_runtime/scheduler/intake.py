"""From a Generate message to Requests, or to the error that refuses it.

A request that is let in can always be served to its end by the pool alone; what cannot is refused here, with the
numbers. The API has checked the same things before; this check guards the engine whoever calls it.
"""

import secrets
from collections.abc import Sequence
from itertools import count

from ..errors import refusal
from ..messages import Generate, unpack_ids
from ..sampling_params import splitmix64
from ..step_plan import Executor
from .request import Request


class Intake:
    def __init__(self, executor: Executor, eos_ids: Sequence[int], max_choices: int) -> None:
        self._vocab_size, self._max_context = executor.vocab_size, executor.max_context
        self._pool_tokens = executor.num_pages * executor.page_size
        self._eos_ids = frozenset(eos_ids)
        self._max_choices = max_choices
        self._arrivals = count()

    def requests(self, message: Generate, now: float) -> list[Request]:
        """One Request a choice. Raises RequestError."""
        prompt_len, params = self._check(message), message.sampling
        limit = min(self._max_context, self._pool_tokens)
        if params.max_new_tokens is not None:
            limit = prompt_len + params.max_new_tokens
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return [
            Request(message, choice, next(self._arrivals), now, splitmix64(seed + choice), limit, stop_ids)
            for choice in range(params.n)
        ]

    def _check(self, message: Generate) -> int:
        """The length of the prompt."""
        ids, params = unpack_ids(message.input_ids), message.sampling
        if not message.rid:  # an Abort without an id ends everything
            raise refusal("invalid_value", "the request id is empty", "rid")
        if len(ids) == 0:
            raise refusal("empty_input", "the prompt has no tokens", "prompt")
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise refusal("invalid_token_id", f"token ids must be in [0, {self._vocab_size})", "input_ids")
        if violation := params.violation(self._vocab_size, self._max_choices):
            raise refusal("invalid_value", violation[1], violation[0])
        for name, low, high in (("logprob_start", -1, len(ids)), ("top_logprobs", 0, self._vocab_size)):
            if not low <= getattr(message, name) <= high:
                raise refusal("invalid_value", f"{name} must be in [{low}, {high}]", name)
        # Without a limit of its own a request takes what is left, which must be a token at least.
        new = 1 if params.max_new_tokens is None else params.max_new_tokens
        for limit, code, what in (
            (self._max_context, "context_length_exceeded", "context"),
            (self._pool_tokens, "kv_capacity_exceeded", "KV cache"),
        ):
            if len(ids) + new > limit:
                numbers = f"{len(ids)} prompt tokens and {new} new tokens"
                raise refusal(code, f"{numbers} exceed the {what} of {limit}", "prompt")
        return len(ids)
