"""What a request must satisfy before anything of it is sent: a pure check, with the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import refusal
from ..sampling_params import SamplingParams

MAX_PROMPTS = 256


@dataclass(slots=True)
class Limits:
    """Sizes that requests are checked against, in tokens. `max_total_tokens` is the KV cache; None until the engine has
    told it."""

    context_length: int
    vocab_size: int
    max_choices: int = 16
    max_total_tokens: int | None = None

    def check_length(self, prompt: int, param: str, new: int = 0, known: str = "") -> None:
        """Raises RequestError unless prompt and new tokens fit. `known` qualifies the numbers."""
        numbers = f"{known}{prompt} prompt tokens and {new} new tokens make {known}{prompt + new}"
        if prompt + new > self.context_length:
            raise refusal("context_length_exceeded", f"{numbers}; the context is {self.context_length} tokens", param)
        if self.max_total_tokens and prompt + new > self.max_total_tokens:
            raise refusal(
                "kv_capacity_exceeded", f"{numbers}; the KV cache holds {self.max_total_tokens} tokens", param
            )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises RequestError `empty_input`, `invalid_token_id`, or that not even the prompt fits."""
        if not ids:
            raise refusal("empty_input", "the prompt is empty", param)
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            at = next(i for i, token in enumerate(ids) if not 0 <= token < self.vocab_size)
            raise refusal("invalid_token_id", f"the id at position {at} is outside [0, {self.vocab_size})", param)
        self.check_length(len(ids), param)


def sampling_params(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """What is not `given` comes from `defaults`. Raises msgspec.ValidationError."""
    values = {**defaults, **given}
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    return msgspec.convert(values, SamplingParams, str_keys=True)


def admit(
    ids: Sequence[int],
    sampling: SamplingParams,
    limits: Limits,
    *,
    prompt_param: str,
    names: Mapping[str, str] | None = None,
    clip: bool = False,
) -> SamplingParams:
    """`sampling` with `max_new_tokens` resolved to a number that fits. `clip`: the client did not ask for that number,
    so it may be lowered. `names` translates fields of SamplingParams to what the route calls them. Raises
    RequestError."""
    names = names or {}
    if violation := sampling.violation(limits.vocab_size, limits.max_choices):
        field, message = violation
        for ours, theirs in names.items():
            message = message.replace(ours, theirs.rpartition(".")[2])
        raise refusal("invalid_value", message[:300], names.get(field, field))
    limits.check_ids(ids, prompt_param)
    limit = sampling.max_new_tokens
    free = min(limits.context_length, limits.max_total_tokens or limits.context_length) - len(ids)
    if limit is None or (clip and limit > free):
        limit = max(free, 1)
    limits.check_length(len(ids), prompt_param, limit)
    if sampling.min_new_tokens > limit:
        message = f"at least {sampling.min_new_tokens} new tokens asked, room for {limit}"
        raise refusal("invalid_value", message, names.get("min_new_tokens", "min_new_tokens"))
    # Beyond the vocabulary top_k is off; so it stays a small integer on the wire.
    return msgspec.structs.replace(sampling, max_new_tokens=limit, top_k=min(sampling.top_k, limits.vocab_size))
