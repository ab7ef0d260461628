"""What a caller may ask for: sampling, and the limits of a request. HTTP, `Engine` and the
scheduler share both."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from .errors import refusal

MAX_STOP_LENGTH = 256
MAX_CHOICES = 128
Ids = Sequence[int] | np.ndarray


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters, SGLang's names. Defaults are neutral; `max_new_tokens=None`: to the end
    of the context.

    The order in which they act is fixed: logit_bias, penalties, min_new_tokens mask, temperature,
    top_k, top_p on the renormalised rest, min_p against the largest kept. `temperature` 0 is
    greedy. Without a `seed` the scheduler draws one at admission; choice i of n uses
    `splitmix64(seed + i)`."""

    n: int = 1
    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[int, float] = {}

    def violations(self, vocab_size: int, max_n: int) -> Iterator[tuple[str, str]]:
        """The fields out of range as (field, sentence). Needs no tokenizer."""
        max_n = min(max_n, MAX_CHOICES)
        longest = math.inf if self.max_new_tokens is None else self.max_new_tokens
        for name, fits, rule in (  # NaN fits nowhere
            ("temperature", 0 <= self.temperature <= 1e6, "be in [0, 1e+06]"),
            ("top_p", 0 < self.top_p <= 1, "be in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "be in [0, 1]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "be in [-2, 2]"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "be in [-2, 2]"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 2, "be in [0.01, 2]"),
            ("n", 1 <= self.n <= max_n, f"be in [1, {max_n}]"),
            ("max_new_tokens", longest >= 0, "not be negative"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= longest, "be in [0, max_new_tokens]"),
            ("top_k", self.top_k >= 1 or self.top_k == -1, "be -1 (off) or at least 1"),
            ("seed", -(2**63) <= (self.seed or 0) < 2**63, "be a signed 64-bit integer"),
        ):
            if not fits:
                yield name, f"{name} must {rule}, got {getattr(self, name)}"
        for name, limit in (("stop", 32), ("stop_token_ids", 1024), ("logit_bias", 1024)):
            if (count := len(getattr(self, name))) > limit:
                yield name, f"{name} may have at most {limit} entries, got {count}"
        if any(not 1 <= len(s) <= MAX_STOP_LENGTH for s in self.stop):
            yield "stop", f"a stop string must have 1 to {MAX_STOP_LENGTH} characters"
        if any(not 0 <= i < vocab_size for i in self.stop_token_ids):
            yield "stop_token_ids", f"stop token ids must be in [0, {vocab_size})"
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                yield "logit_bias", f"token id {token} is outside [0, {vocab_size})"
            if not -100 <= bias <= 100:
                yield "logit_bias", f"bias of token {token} must be in [-100, 100], got {bias}"

    @property
    def has_penalties(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0, 0, 1)


@dataclass(slots=True)
class Limits:
    """Sizes in tokens. `max_total_tokens` is the KV cache; None until the engine has told it."""

    context_length: int
    vocab_size: int
    max_choices: int = 16
    max_total_tokens: int | None = None

    def check_length(self, prompt: int, param: str, new: int = 0, known: str = "") -> None:
        """Raises RequestError unless prompt and new tokens fit. `known` qualifies the numbers."""
        numbers = f"{known}{prompt} prompt tokens and {new} new tokens make {known}{prompt + new}"
        context, pool = self.context_length, self.max_total_tokens
        if prompt + new > context:
            raise refusal(
                "context_length_exceeded", f"{numbers}; the context is {context} tokens", param
            )
        if pool and prompt + new > pool:
            raise refusal(
                "kv_capacity_exceeded", f"{numbers}; the KV cache holds {pool} tokens", param
            )

    def check_ids(self, ids: Ids, param: str, new: int = 0) -> None:
        """Raises RequestError `empty_input`, `invalid_token_id`, or that prompt and new tokens do
        not fit."""
        if not len(ids):
            raise refusal("empty_input", "the prompt is empty", param)
        array = np.asarray(ids)
        if len(outside := np.flatnonzero((array < 0) | (array >= self.vocab_size))):
            text = f"the id at position {outside[0]} is outside [0, {self.vocab_size})"
            raise refusal("invalid_token_id", text, param)
        self.check_length(len(ids), param, new)

    def admit(
        self, ids: Ids, sampling: SamplingParams, param: str, names: Mapping[str, str], clip: bool
    ) -> SamplingParams:
        """`sampling` with a `max_new_tokens` that fits. `clip`: nobody asked for that number, so it
        may be lowered. `names` translates fields of SamplingParams to what the route calls them.
        Raises RequestError."""
        for field, message in sampling.violations(self.vocab_size, self.max_choices):
            for ours, theirs in names.items():
                message = message.replace(ours, theirs.rpartition(".")[2])
            raise refusal("invalid_value", message[:300], names.get(field, field))
        limit = sampling.max_new_tokens
        free = min(self.context_length, self.max_total_tokens or self.context_length) - len(ids)
        if limit is None or (clip and limit > free):
            limit = max(free, 1)
        self.check_ids(ids, param, limit)
        if sampling.min_new_tokens > limit:
            message = f"at least {sampling.min_new_tokens} new tokens asked, room for {limit}"
            raise refusal("invalid_value", message, names.get("min_new_tokens", "min_new_tokens"))
        # Beyond the vocabulary top_k is off; so it stays a small integer on the wire.
        return msgspec.structs.replace(
            sampling, max_new_tokens=limit, top_k=min(sampling.top_k, self.vocab_size)
        )


def splitmix64(x: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014) on 64-bit wrap-around integers."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
