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
        if len(message.input_ids) % 4:
            raise RequestError(400, "invalid_value", "input_ids must be int32", param="input_ids")
        ids = unpack_ids(message.input_ids)
        if len(ids) == 0:
            raise RequestError(400, "empty_input", "the prompt has no tokens", param="prompt")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise RequestError(
                400, "invalid_token_id", f"token ids must be in [0, {self.vocab_size})",
                param="input_ids",
            )  # fmt: skip
        violation = message.sampling.violation(self.vocab_size, self.max_choices)
        if violation is not None:
            raise RequestError(400, "invalid_value", violation[1], param=violation[0])
        if not -1 <= message.logprob_start <= len(ids):
            raise RequestError(
                400, "invalid_value", f"logprob_start must be in [-1, {len(ids)}]",
                param="logprob_start",
            )  # fmt: skip
        if not 0 <= message.top_logprobs <= self.vocab_size:
            raise RequestError(
                400, "invalid_value", "top_logprobs is out of range", param="top_logprobs"
            )
        self._check_room(len(ids), message.sampling.max_new_tokens)

    def _check_room(self, prompt: int, max_new_tokens: int | None) -> None:
        # Without a limit of its own a request takes what is left, which must be a token at least.
        wanted = prompt + (1 if max_new_tokens is None else max_new_tokens)
        numbers = f"{prompt} prompt tokens and {wanted - prompt} new tokens"
        if wanted > self.max_context:
            raise RequestError(
                400, "context_length_exceeded",
                f"{numbers} exceed the context of {self.max_context} tokens", param="prompt",
            )  # fmt: skip
        if wanted > self.pool_tokens:
            raise RequestError(
                400, "kv_capacity_exceeded",
                f"{numbers} exceed the KV cache of {self.pool_tokens} tokens", param="prompt",
            )  # fmt: skip
