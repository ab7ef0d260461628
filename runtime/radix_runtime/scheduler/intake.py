"""From a Generate message to Requests, or to the error that refuses it.

A request that is let in can always be served to its end by the pool alone; what cannot is refused here, with the
numbers. The API has checked the same things before; this check guards the engine whoever calls it.
"""

import secrets
from collections.abc import Sequence
from itertools import count

import numpy as np

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
        ids, params = unpack_ids(message.input_ids), message.sampling
        self._check(message, ids)
        limit = min(self._max_context, self._pool_tokens)
        if params.max_new_tokens is not None:
            limit = len(ids) + params.max_new_tokens
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return [
            Request(message, choice, next(self._arrivals), now, splitmix64(seed + choice), limit, stop_ids)
            for choice in range(params.n)
        ]

    def _check(self, message: Generate, ids: np.ndarray) -> None:
        params, vocab, context, pool = message.sampling, self._vocab_size, self._max_context, self._pool_tokens
        field, violation = params.violation(vocab, self._max_choices) or ("", "")
        start, top = f"logprob_start must be in [-1, {len(ids)}]", f"top_logprobs must be in [0, {vocab}]"
        # Without a limit of its own a request takes what is left, which must be a token at least.
        new = 1 if params.max_new_tokens is None else params.max_new_tokens
        end, exceed = len(ids) + new, f"{len(ids)} prompt tokens and {new} new tokens exceed the"
        for wrong, code, text, param in (
            (not message.rid, "invalid_value", "the request id is empty", "rid"),  # an Abort of "" ends everything
            (len(ids) == 0, "empty_input", "the prompt has no tokens", "prompt"),
            (((ids < 0) | (ids >= vocab)).any(), "invalid_token_id", f"token ids must be in [0, {vocab})", "input_ids"),
            (bool(field), "invalid_value", violation, field),
            (not -1 <= message.logprob_start <= len(ids), "invalid_value", start, "logprob_start"),
            (not 0 <= message.top_logprobs <= vocab, "invalid_value", top, "top_logprobs"),
            (end > context, "context_length_exceeded", f"{exceed} context of {context}", "prompt"),
            (end > pool, "kv_capacity_exceeded", f"{exceed} KV cache of {pool}", "prompt"),
        ):
            if wrong:
                raise refusal(code, text, param)
