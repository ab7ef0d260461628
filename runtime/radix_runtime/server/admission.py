"""What a request must satisfy before anything of it is sent: a pure check, with the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ..errors import RequestError, refusal
from ..sampling_params import SamplingParams

MAX_PROMPTS = 256


@dataclass(slots=True)
class Limits:
    """Sizes that requests are checked against, in tokens. `max_total_tokens` is the KV cache; None
    until the engine has told it."""

    context_length: int
    vocab_size: int
    max_choices: int = 16
    max_total_tokens: int | None = None

    @property
    def room(self) -> int:
        """Longest prompt plus output."""
        return min(self.context_length, self.max_total_tokens or self.context_length)


def admit(
    ids: Sequence[int],
    sampling: SamplingParams,
    limits: Limits,
    *,
    prompt_param: str,
    names: Mapping[str, str] | None = None,
    clip: bool = False,
) -> SamplingParams:
    """`sampling` with `max_new_tokens` resolved to a number that fits. `clip`: the client did not
    ask for that number, so it may be lowered. `names` translates fields of SamplingParams to what
    the route calls them. Raises RequestError."""
    names = names or {}
    if violation := sampling.violation(limits.vocab_size, limits.max_choices):
        field, message = violation
        for ours, theirs in names.items():
            message = message.replace(ours, theirs.rpartition(".")[2])
        raise refusal("invalid_value", message[:300], names.get(field, field))
    check_token_ids(ids, limits, prompt_param)
    limit, free = sampling.max_new_tokens, limits.room - len(ids)
    if limit is None or (clip and limit > free):
        limit = max(free, 1)
    if limit > free:
        raise _too_long(len(ids), limit, limits, prompt_param)
    if sampling.min_new_tokens > limit:
        message = f"at least {sampling.min_new_tokens} new tokens asked, room for {limit}"
        raise refusal("invalid_value", message, names.get("min_new_tokens", "min_new_tokens"))
    # Beyond the vocabulary top_k is off; so it stays a small integer on the wire.
    top_k = min(sampling.top_k, limits.vocab_size)
    return msgspec.structs.replace(sampling, max_new_tokens=limit, top_k=top_k)


def check_token_ids(ids: Sequence[int], limits: Limits, param: str) -> None:
    """Raises RequestError `invalid_token_id`, `empty_input`, or that not even the prompt fits."""
    if not ids:
        raise refusal("empty_input", "the prompt is empty", param)
    vocab = limits.vocab_size
    if min(ids) < 0 or max(ids) >= vocab:
        at = next(i for i, token in enumerate(ids) if not 0 <= token < vocab)
        message = f"the id at position {at} is outside [0, {vocab})"
        raise refusal("invalid_token_id", message, param)
    check_prompt_length(len(ids), limits, param)


def check_prompt_length(length: int, limits: Limits, param: str, *, known: str = "") -> None:
    """Raises RequestError when not even the prompt fits. `known` qualifies the number."""
    if length > limits.room:
        raise _too_long(length, 0, limits, param, known)


def _too_long(prompt: int, new: int, limits: Limits, param: str, known: str = "") -> RequestError:
    numbers = f"{known}{prompt} prompt tokens and {new} new tokens make {known}{prompt + new}"
    if prompt + new > limits.context_length:
        reason = f"the context is {limits.context_length} tokens"
        return refusal("context_length_exceeded", f"{numbers}; {reason}", param)
    reason = f"the KV cache holds {limits.max_total_tokens} tokens"
    return refusal("kv_capacity_exceeded", f"{numbers}; {reason}", param)
