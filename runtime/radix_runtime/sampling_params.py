"""Sampling parameters and limits of a request, shared by HTTP, `Engine` and the scheduler."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec
import numpy as np

from .errors import refusal

MAX_STOP_LENGTH = 256
_MAX_SHOWN = 128  # characters of a value that a message repeats
MAX_CHOICES = 128
MAX_ENTRIES = {"stop": 32, "stop_token_ids": 1024, "keep_special": 1024, "logit_bias": 1024}

Ids = Sequence[int] | np.ndarray
Names = Mapping[str, str]  # from fields of SamplingParams to what a caller calls them
NO_NAMES: Names = {}


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters, SGLang's names. Defaults are neutral; `max_new_tokens=None`: to the end
    of the context.

    The order in which they act is fixed: logit_bias, penalties, min_new_tokens mask, temperature,
    top_k, top_p on the renormalised rest, min_p against the largest kept. `temperature` 0 is
    greedy. `keep_special` are special tokens that are shown although `skip_special_tokens` hides
    the others: those that a parser of the text needs. Without a `seed` the scheduler draws one at
    admission; choice i of n uses `splitmix64(seed + i)`."""

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
    keep_special: list[int] = []
    no_stop_trim: bool = False
    logit_bias: dict[int, float] = {}

    def violations(
        self, vocab_size: int, max_n: int, names: Names = NO_NAMES
    ) -> Iterator[tuple[str, str]]:
        """The fields out of range, as (field, sentence). Needs no tokenizer.

        `names` are what the caller calls the fields, where that differs.
        """
        shown = {name: names.get(name, name) for name in self.__struct_fields__}
        for name, fits, rule in self._range_rules(min(max_n, MAX_CHOICES), shown):
            if not fits:
                yield name, f"{shown[name]} must {rule}, got {short(getattr(self, name))}"
        for name, limit in MAX_ENTRIES.items():
            count = len(getattr(self, name))
            if count > limit:
                yield name, f"{shown[name]} may have at most {limit} entries, got {count}"
        if not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in self.stop):
            yield "stop", f"a stop string must have 1 to {MAX_STOP_LENGTH} characters"
        if not all(0 <= token < vocab_size for token in self.stop_token_ids):
            yield "stop_token_ids", f"stop token ids must be in [0, {vocab_size})"
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                yield "logit_bias", f"token id {token} is outside [0, {vocab_size})"
            if not -100 <= bias <= 100:
                yield "logit_bias", f"bias of token {token} must be in [-100, 100], got {bias}"

    def _range_rules(self, max_n: int, shown: Names) -> Iterator[tuple[str, bool, str]]:
        """(field, whether its value fits, what it must do). NaN fits nowhere."""
        longest = math.inf if self.max_new_tokens is None else self.max_new_tokens
        seed = self.seed or 0
        yield "temperature", 0 <= self.temperature <= 1e6, "be in [0, 1e+06]"
        yield "top_p", 0 < self.top_p <= 1, "be in (0, 1]"
        yield "min_p", 0 <= self.min_p <= 1, "be in [0, 1]"
        yield "frequency_penalty", -2 <= self.frequency_penalty <= 2, "be in [-2, 2]"
        yield "presence_penalty", -2 <= self.presence_penalty <= 2, "be in [-2, 2]"
        yield "repetition_penalty", 0.01 <= self.repetition_penalty <= 2, "be in [0.01, 2]"
        yield "n", 1 <= self.n <= max_n, f"be in [1, {max_n}]"
        yield "max_new_tokens", longest >= 0, "not be negative"
        fits = 0 <= self.min_new_tokens <= longest
        yield "min_new_tokens", fits, f"be in [0, {shown['max_new_tokens']}]"
        yield "top_k", self.top_k >= -1, "be -1 or 0 (off), or at least 1"
        yield "seed", -(2**63) <= seed < 2**63, "be a signed 64-bit integer"

    def hides(self, token: int, special_ids: Set[int]) -> bool:
        """Whether a token is not shown in the text; `special_ids` are the tokenizer's."""
        is_hidden = self.skip_special_tokens and token in special_ids
        return is_hidden and token not in self.keep_special

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes logits."""
        is_additive = self.frequency_penalty != 0 or self.presence_penalty != 0
        return is_additive or self.repetition_penalty != 1


@dataclass(slots=True)
class Limits:
    """What a request may ask for; sizes in tokens.

    `context_length` bounds prompt and output together, `max_choices` the n of a request;
    `max_total_tokens` is the size of the KV cache, None until the engine has reported it.
    """

    context_length: int
    vocab_size: int
    max_choices: int = 16
    max_total_tokens: int | None = None

    def check_length(
        self, prompt: int, param: str, new: int = 0, new_param: str = "", known: str = ""
    ) -> None:
        """Raises RequestError unless `prompt` and `new` tokens fit.

        The error names `param` where the prompt alone is too long, else `new_param`. Its words are
        OpenAI's: clients look for them to shorten a conversation or to turn to another model.
        `known` qualifies the numbers, as "at least " where the prompt has not been tokenized.
        """
        total = prompt + new
        numbers = (
            f"However, you requested {known}{total} tokens "
            f"({known}{prompt} in the prompt, {new} in the completion)"
        )
        if total > self.context_length:
            message = (
                f"This model's maximum context length is {self.context_length} tokens. {numbers}. "
                "Please reduce the length of the prompt or of the completion "
                "(context_length_exceeded)."
            )
            cause = _length_cause(prompt, self.context_length, param, new_param)
            raise refusal("context_length_exceeded", message, cause)
        if self.max_total_tokens and total > self.max_total_tokens:
            message = (
                f"This model's maximum context length is {self.max_total_tokens} tokens on this "
                f"server, the size of its KV cache. {numbers}. "
                "Please reduce the length of the prompt or of the completion."
            )
            cause = _length_cause(prompt, self.max_total_tokens, param, new_param)
            raise refusal("kv_capacity_exceeded", message, cause)

    def check_ids(self, ids: Ids, param: str, new: int = 0, new_param: str = "") -> None:
        """Raises RequestError unless `ids` are token ids, one at least, and fit with `new` more.

        `param` and `new_param`: see `check_length`.
        """
        if len(ids) == 0:
            raise refusal("empty_input", "the prompt is empty", param)
        array = np.asarray(ids)
        outside = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if len(outside):
            message = f"the id at position {outside[0]} is outside [0, {self.vocab_size})"
            raise refusal("invalid_token_id", message, param)
        self.check_length(len(ids), param, new, new_param)

    def admit(
        self, ids: Ids, sampling: SamplingParams, param: str, names: Names, clip: bool
    ) -> SamplingParams:
        """`sampling` with a `max_new_tokens` that fits beside the prompt `ids`.

        `param` is the field of the prompt. `names` are the dotted paths by which the route knows
        the fields of SamplingParams, where they differ; messages say the last part. `clip`: nobody
        asked for that number of tokens, so it may be lowered. Raises RequestError.
        """
        shown = {field: path.rpartition(".")[2] for field, path in names.items()}
        for field, message in sampling.violations(self.vocab_size, self.max_choices, shown):
            raise refusal("invalid_value", message[:300], names.get(field, field))
        length = sampling.max_new_tokens
        free = min(self.context_length, self.max_total_tokens or self.context_length) - len(ids)
        if length is None or (clip and length > free):
            length = max(free, 1)
        self.check_ids(ids, param, length, names.get("max_new_tokens", "max_new_tokens"))
        if sampling.min_new_tokens > length:
            message = f"at least {sampling.min_new_tokens} new tokens asked, room for {length}"
            raise refusal("invalid_value", message, names.get("min_new_tokens", "min_new_tokens"))
        # A top_k of the vocabulary or more is off; the smaller number stays small on the wire.
        top_k = min(sampling.top_k, self.vocab_size)
        if top_k == 0:  # off, as for transformers and vLLM
            top_k = -1
        return msgspec.structs.replace(sampling, max_new_tokens=length, top_k=top_k)


def _length_cause(prompt: int, limit: int, param: str, new_param: str) -> str:
    """The field to name: that of the prompt where not even one new token would fit beside it."""
    return new_param if new_param and prompt < limit else param


def short(value: object) -> str:
    """A value that a client gave, as far as a message repeats it."""
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def splitmix64(x: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014) on 64-bit wrap-around integers."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
