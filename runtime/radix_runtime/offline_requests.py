"""What the callers of `Engine` give, as requests of the scheduler."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from .constraint import ConstrainedParams, Constraint
from .errors import RequestError
from .grammar.service import Grammars
from .messages import Generate, pack_ids
from .sampling_params import Limits, SamplingParams
from .suggestions import did_you_mean
from .text.tokenizer import Tokenizer

Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]
Constrain = Callable[[Constraint | None, SamplingParams], Constraint | None]
T = TypeVar("T")
InputIds = Sequence[int] | Sequence[Sequence[int]]


class LogprobOptions(msgspec.Struct, frozen=True, kw_only=True):
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
    `tokenizer` prompts must be token ids. `grammars` compile constraints.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: Limits,
        defaults: Mapping[str, Any],
        grammars: Grammars,
    ) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
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
        constrain: Sequence[Constrain] | None = None,
    ) -> RequestBatch:
        """The requests of a call, checked. The arguments are those of `Engine.generate`; the error
        about one prompt of a list says which. `constrain`: see `build`, one for each prompt."""
        prompts, is_single = self._prompt_ids(prompt, input_ids)
        logprobs = checked(logprobs, LogprobOptions, "")
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
                change = None if constrain is None else constrain[number]
                requests.append(self.build(ids, given, logprobs, stream=stream, constrain=change))
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
        if prompt is not None:
            if isinstance(prompt, str):
                return [self.ids(prompt)], True
            items = _listed("prompt", prompt)
            if are_ids(items):
                return [self.ids(items)], True
            for number, item in enumerate(items):
                if not isinstance(item, str):
                    items[number] = _listed(f"prompt {number}", item)
            return [self.ids(item) for item in items], False
        if isinstance(input_ids, str):
            raise ValueError("input_ids are token ids; texts are prompts")
        given = _listed("input_ids", input_ids)
        if any(isinstance(item, str) for item in given):
            raise ValueError("input_ids are token ids; texts are prompts")
        if len(given) == 0 or are_ids(given):
            return [self.ids(given)], True
        return [self.ids(_listed(f"input_ids {i}", item)) for i, item in enumerate(given)], False

    def ids(self, text: Any, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, or of a sequence of integers of any kind.

        A fraction raises TypeError.
        """
        if not isinstance(text, str):
            return [index(i) for i in text]
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer: pass input_ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is no valid text: {error.reason}") from None
        return self._tokenizer.encode(text, add_special_tokens)

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
        constrain: Constrain | None = None,
    ) -> Generate:
        """One request, within the engine's limits. `constrain` gives the constraint that the answer
        is to follow, from that of the parameters and these."""
        params, constraint, clip = self._to_sampling_params(given)
        try:
            if constrain is not None:
                constraint = constrain(constraint, params)
            params = self._limits.admit(ids, params, param="prompt", names={}, clip=clip)
        except RequestError as error:
            raise ValueError(error.message) from None
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer: use stop_token_ids")
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
            constraint=self._compiled(constraint),
        )

    def _compiled(self, constraint: Constraint | None) -> Constraint | None:
        """A constraint that can be kept. The first one waits for the start of the compiler."""
        if constraint is None:
            return None
        try:
            return self._grammars.check(constraint).constraint
        except RequestError as error:
            kind = ValueError if error.status < 500 else RuntimeError
            raise kind(error.message) from None

    def _to_sampling_params(
        self, given: SamplingParams | Mapping[str, Any] | None
    ) -> tuple[SamplingParams, Constraint | None, bool]:
        """The parameters, what the answer must look like, and whether `max_new_tokens` is a default
        that may be lowered to fit."""
        is_struct = isinstance(given, SamplingParams)
        if isinstance(given, SamplingParams):
            values = {}
            known = {name: getattr(given, name) for name in given.__struct_fields__}
        elif given is None or isinstance(given, Mapping):
            values = dict(self._defaults)
            known = dict(given or {})
        else:
            kind = type(given).__name__
            raise ValueError(f"sampling_params are a SamplingParams or a dict, not {kind}")
        for name, value in known.items():
            # None leaves a field out, as null does over HTTP, but is itself a value of this one.
            if value is not None or name == "max_new_tokens":
                values[name] = value
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        _require_fields(values)
        params = checked(values, ConstrainedParams, "sampling_params: ")
        try:
            constraint = params.constraint()
        except RequestError as error:
            raise ValueError(error.message) from None
        except TypeError as error:  # of what is no JSON
            raise ValueError(f"sampling_params: {error}") from None
        return params.sampling(), constraint, not is_struct and "max_new_tokens" not in values


def _listed(what: str, value: Any) -> list[Any]:
    """A sequence, an array or another iterable as a list. Raises ValueError for anything else."""
    if not isinstance(value, Mapping | bytes | bytearray | str):
        with suppress(TypeError):
            return list(value)
    kind = type(value).__name__
    raise ValueError(f"{what} is of type {kind}; a prompt is a text or token ids (input_ids)")


def _require_fields(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a sampling parameter that there is not."""
    for name in values:
        if name not in ConstrainedParams.__struct_fields__:
            hint = did_you_mean(str(name), ConstrainedParams.__struct_fields__)
            raise ValueError(f"sampling_params have no {name}{hint}")


def checked(value: Any, kind: type[T], place: str) -> T:
    """`value` as a `kind`, such as a msgspec Struct, also where it is one whose fields nobody has
    checked. Raises ValueError, which begins with `place`."""
    try:
        return msgspec.convert(plain(value), kind, str_keys=True)
    except (msgspec.ValidationError, TypeError, RecursionError) as error:
        raise ValueError(f"{place}{error}") from None


def plain(value: Any) -> Any:
    """NumPy's numbers and arrays, and Structs, also within others, as Python's and as dicts. Raises
    TypeError for keys that cannot be those of a dict, RecursionError for what has no end."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value).items()
        return {name: plain(part) for name, part in fields if part is not None}
    if isinstance(value, Mapping):
        return {plain(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def are_ids(value: Any) -> bool:
    """Whether `value` is one sequence of token ids, rather than one of texts or of sequences."""
    return len(value) > 0 and not isinstance(value[0], str) and np.ndim(value[0]) == 0
