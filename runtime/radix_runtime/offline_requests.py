"""What the callers of `Engine` give, as requests of the scheduler."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .errors import RequestError
from .messages import Generate, pack_ids
from .sampling_params import Limits, SamplingParams
from .text.conversation import read_messages
from .text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
Conversations = Messages | Sequence[Messages]
Prompts = str | Sequence[str]
InputIds = Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class LogprobOptions:
    """Which log-probabilities a request returns; the fields are those of `Engine.generate`."""

    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0


class RequestBatch(NamedTuple):
    """The requests of one call. `is_single`: its prompt was given as such, not in a list."""

    requests: list[Generate]
    is_single: bool = False


class RequestBuilder:
    """Tokenizes prompts and checks requests. Raises ValueError for what cannot be served.

    `defaults` are the sampling parameters that hold where a caller gives none; without a
    `tokenizer` prompts must be token ids.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, limits: Limits, defaults: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._defaults = defaults

    def batch(
        self,
        prompt: Prompts | None,
        sampling_params: Any,
        input_ids: InputIds | None,
        logprobs: LogprobOptions,
        *,
        stream: bool,
    ) -> RequestBatch:
        """The requests of a call, checked. The arguments are those of `Engine.generate`; the error
        about one prompt of a list says which."""
        prompts, is_single = self._prompt_ids(prompt, input_ids)
        if isinstance(sampling_params, list | tuple):
            params = sampling_params
        else:
            params = [sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts")
        if not logprobs.return_logprob and logprobs != LogprobOptions():
            raise ValueError("logprob_start_len and top_logprobs_num need return_logprob")
        requests = []
        for number, (ids, given) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self.build(ids, given, logprobs, stream=stream))
            except ValueError as error:
                place = "" if is_single else f"prompt {number}: "
                raise ValueError(f"{place}{error}") from None
        return RequestBatch(requests, is_single)

    def _prompt_ids(
        self, prompt: Prompts | None, input_ids: InputIds | None
    ) -> tuple[list[list[int]], bool]:
        """The token ids of every prompt, and whether a single one was given."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("pass either prompt or input_ids")
        if isinstance(prompt, str):
            return [self.ids(prompt)], True
        if prompt is not None:
            return [self.ids(text) for text in prompt], False
        given: Any = input_ids
        if len(given) == 0 or are_ids(given):
            return [self.ids(given)], True
        return [self.ids(ids) for ids in given], False

    def ids(self, text: Any, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, or of a sequence of integers of any kind.

        A fraction raises TypeError.
        """
        if not isinstance(text, str):
            return [index(i) for i in text]
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer: pass input_ids")
        return self._tokenizer.encode(text, add_special_tokens)

    def chat_ids(
        self, conversations: Conversations, options: Mapping[str, Any]
    ) -> list[int] | list[list[int]]:
        """The prompts of conversations, or of a single one, by the model's chat template; `options`
        are variables of the template."""
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer: pass input_ids to generate")
        template = self._tokenizer.chat_template
        unknown = sorted(set(options) - (template.variables if template else set()))
        if unknown:
            raise ValueError(f"this model's chat template has no {unknown[0]}")
        if len(conversations) == 0 or isinstance(conversations[0], Mapping):
            return self._conversation(conversations, options)
        return [self._conversation(messages, options) for messages in conversations]

    def _conversation(self, messages: Any, options: Mapping[str, Any]) -> list[int]:
        assert self._tokenizer is not None
        try:
            return self._tokenizer.apply_chat_template(read_messages(messages), **options)
        except RequestError as error:
            raise ValueError(error.message) from None

    def joined(self, first: Any, second: Any) -> list[int]:
        """The token ids of two texts, or sequences of ids, one after the other."""
        if isinstance(first, str) and isinstance(second, str):
            return self.ids(first + second)
        return self.ids(first) + self.ids(second, add_special_tokens=False)

    def build(
        self,
        ids: list[int],
        given: SamplingParams | Mapping[str, Any] | None,
        logprobs: LogprobOptions,
        *,
        stream: bool = False,
    ) -> Generate:
        """One request, within the engine's limits."""
        params, clip = self._to_sampling_params(given)
        try:
            params = self._limits.admit(ids, params, param="prompt", names={}, clip=clip)
        except RequestError as error:
            raise ValueError(error.message) from None
        if not -1 <= logprobs.logprob_start_len <= len(ids):
            raise ValueError(f"logprob_start_len must be in [-1, {len(ids)}]")
        if not 0 <= logprobs.top_logprobs_num <= self._limits.vocab_size:
            raise ValueError(f"top_logprobs_num must be in [0, {self._limits.vocab_size}]")
        return Generate(
            rid=secrets.token_hex(16),
            input_ids=pack_ids(ids),
            sampling=params,
            stream=stream,
            return_logprob=logprobs.return_logprob,
            logprob_start=logprobs.logprob_start_len,
            top_logprobs=logprobs.top_logprobs_num,
        )

    def _to_sampling_params(
        self, given: SamplingParams | Mapping[str, Any] | None
    ) -> tuple[SamplingParams, bool]:
        """The parameters, and whether `max_new_tokens` is a default that may be lowered to fit."""
        if isinstance(given, SamplingParams):
            return given, False
        values = dict(self._defaults)
        for name, value in dict(given or {}).items():
            # None leaves a field out, as null does over HTTP, but is itself a value of this one.
            if value is not None or name == "max_new_tokens":
                values[name] = value
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        try:
            params = msgspec.convert(values, SamplingParams, str_keys=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params: {error}") from None
        return params, "max_new_tokens" not in values


def chat_sampling(given: Any) -> Any:
    """Sampling parameters of a chat, or a list of them: to the end of the context where a dict
    leaves `max_new_tokens` out."""
    if isinstance(given, SamplingParams):
        return given
    if isinstance(given, list | tuple):
        return [chat_sampling(params) for params in given]
    return {"max_new_tokens": None, **(given or {})}


def are_ids(value: Any) -> bool:
    """Whether `value` is one sequence of token ids, rather than one of texts or of sequences."""
    return len(value) > 0 and not isinstance(value[0], str) and np.ndim(value[0]) == 0
