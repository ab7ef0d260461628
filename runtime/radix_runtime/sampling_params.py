"""What a caller may ask of the sampler. One struct serves HTTP, `Engine` and the scheduler."""

from __future__ import annotations

import math

import msgspec

MAX_STOP_LENGTH = 256
MAX_CHOICES = 128


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters, SGLang's names. Defaults are neutral; `max_new_tokens=None` means "to
    the end of the context".

    The order in which they act is fixed: logit_bias, penalties, min_new_tokens mask, temperature,
    top_k, top_p on the renormalised rest, min_p against the largest kept. `temperature` 0 is
    greedy. Without a `seed` the scheduler draws one at admission; choice i of n uses
    `splitmix64(seed + i)`.
    """

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

    def violation(self, vocab_size: int, max_n: int = 16) -> tuple[str, str] | None:
        """The first field out of range as (field, sentence), or None. Needs no tokenizer."""
        for name, low, high, open_low in _FLOAT_RANGES:
            value = getattr(self, name)
            inside = math.isfinite(value) and (low < value if open_low else low <= value)
            if not inside or value > high:
                bracket = "(" if open_low else "["
                return name, f"{name} must be in {bracket}{low:g}, {high:g}], got {value}"
        max_n = min(max_n, MAX_CHOICES)
        longest = math.inf if self.max_new_tokens is None else self.max_new_tokens
        seed_fits = self.seed is None or -(2**63) <= self.seed < 2**63
        for name, fits, rule in (
            ("n", 1 <= self.n <= max_n, f"be in [1, {max_n}]"),
            ("max_new_tokens", longest >= 0, "not be negative"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= longest, "be in [0, max_new_tokens]"),
            ("top_k", self.top_k >= 1 or self.top_k == -1, "be -1 (off) or at least 1"),
            ("seed", seed_fits, "be a signed 64-bit integer"),
        ):
            if not fits:
                return name, f"{name} must {rule}, got {getattr(self, name)}"
        return self._list_violation(vocab_size)

    def _list_violation(self, vocab_size: int) -> tuple[str, str] | None:
        for name, limit in _LONGEST.items():
            if (count := len(getattr(self, name))) > limit:
                return name, f"{name} may have at most {limit} entries, got {count}"
        if any(not 1 <= len(s) <= MAX_STOP_LENGTH for s in self.stop):
            return "stop", f"a stop string must have 1 to {MAX_STOP_LENGTH} characters"
        if any(not 0 <= i < vocab_size for i in self.stop_token_ids):
            return "stop_token_ids", f"stop token ids must be in [0, {vocab_size})"
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                return "logit_bias", f"token id {token} is outside [0, {vocab_size})"
            if not -100 <= bias <= 100:
                return "logit_bias", f"bias of token {token} must be in [-100, 100], got {bias}"
        return None

    @property
    def has_penalties(self) -> bool:
        additive = (self.frequency_penalty, self.presence_penalty)
        return additive != (0, 0) or self.repetition_penalty != 1


_LONGEST = {"stop": 32, "stop_token_ids": 1024, "logit_bias": 1024}
# name, lowest, highest, lowest excluded
_FLOAT_RANGES = (
    ("temperature", 0.0, 1e6, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("presence_penalty", -2.0, 2.0, False),
    ("repetition_penalty", 0.0, 2.0, True),
)


def splitmix64(x: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014) on 64-bit wrap-around integers."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
