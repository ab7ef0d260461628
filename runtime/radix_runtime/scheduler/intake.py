"""From a Generate message to Requests, or to the error that refuses it.

A request that is let in can always be served to its end by the pool alone; what cannot is refused
here, with the numbers. The API has checked the same things before it tokenised; this check guards
the engine whoever calls it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ..errors import RequestError
from ..messages import Generate, unpack_ids
from ..sampling_params import splitmix64
from ..step_plan import Executor
from .request import Request


class Intake:
    def __init__(self, executor: Executor, eos_ids: Sequence[int], max_choices: int) -> None:
        self.vocab_size = executor.vocab_size
        self.max_context = executor.max_context
        self.pool_tokens = executor.num_pages * executor.page_size
        self.eos_ids = frozenset(eos_ids)
        self.max_choices = max_choices
        self._arrivals = 0

    def requests(self, message: Generate, now: float) -> list[Request]:
        """One Request a choice. Raises RequestError."""
        self._check(message)
        params = message.sampling
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_ids
        seed = secrets.randbits(64) if params.seed is None else params.seed
        requests = []
        for choice in range(params.n):
            self._arrivals += 1
            request = Request(
                message,
                choice,
                self._arrivals,
                arrival=now,
                seed=splitmix64(seed + choice),
                max_total_len=self._max_total_len(message),
                stop_ids=stop_ids,
            )
            requests.append(request)
        return requests

    def _max_total_len(self, message: Generate) -> int:
        limit = min(self.max_context, self.pool_tokens)
        if message.sampling.max_new_tokens is None:
            return limit
        return len(message.input_ids) // 4 + message.sampling.max_new_tokens

    def _check(self, message: Generate) -> None:
        if not message.rid:  # an Abort without an id ends everything
            raise _invalid("rid", "the request id is empty")
        if len(message.input_ids) % 4:
            raise _invalid("input_ids", "input_ids must be int32")
        ids = unpack_ids(message.input_ids)
        if len(ids) == 0:
            raise RequestError(400, "empty_input", "the prompt has no tokens", param="prompt")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            text = f"token ids must be in [0, {self.vocab_size})"
            raise RequestError(400, "invalid_token_id", text, param="input_ids")
        violation = message.sampling.violation(self.vocab_size, self.max_choices)
        if violation is not None:
            raise _invalid(*violation)
        if not -1 <= message.logprob_start <= len(ids):
            raise _invalid("logprob_start", f"logprob_start must be in [-1, {len(ids)}]")
        if not 0 <= message.top_logprobs <= self.vocab_size:
            raise _invalid("top_logprobs", f"top_logprobs must be in [0, {self.vocab_size}]")
        self._check_room(len(ids), message.sampling.max_new_tokens)

    def _check_room(self, prompt: int, max_new_tokens: int | None) -> None:
        # Without a limit of its own a request takes what is left, which must be a token at least.
        new = 1 if max_new_tokens is None else max_new_tokens
        limits = (
            (self.max_context, "context_length_exceeded", "context"),
            (self.pool_tokens, "kv_capacity_exceeded", "KV cache"),
        )
        for limit, code, name in limits:
            if prompt + new > limit:
                text = f"{prompt} prompt tokens and {new} new tokens exceed the {name} of {limit}"
                raise RequestError(400, code, text, param="prompt")


def _invalid(param: str, text: str) -> RequestError:
    return RequestError(400, "invalid_value", text, param=param)
