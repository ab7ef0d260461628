"""The requests of calls that have a list of prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import refusal
from ..messages import Generate
from ..sampling_params import Ids, SamplingParams
from .prompt_scores import want_prompt_scores
from .protocol import OPENAI_NAMES, CompletionBody, GenerateBody, GenerateSampling
from .request_rules import RequestRules, new_request

_SGLANG_NAMES = {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__}


def completion_requests(
    rules: RequestRules, body: CompletionBody, all_ids: Sequence[Ids]
) -> Iterator[Generate]:
    """That of each prompt of /v1/completions. Raises RequestError."""
    for ids in all_ids:
        request = new_request(rules, body, ids, param="prompt", names=OPENAI_NAMES)
        if body.logprobs is not None:
            request.return_logprob = True
            request.top_logprobs = body.logprobs
        echoed = body.logprobs if body.echo else None
        want_prompt_scores(request, body.prompt_logprobs, echoed)
        yield request


def generate_requests(
    rules: RequestRules, body: GenerateBody, all_ids: Sequence[Ids], param: str
) -> Iterator[Generate]:
    """That of each prompt of /generate, which stood in the field `param`. Raises RequestError."""
    count = len(all_ids)
    samplings = spread(body.sampling_params, count, "sampling_params")
    wanted = _wanted_logprobs(body, count)
    for ids, sampling, logprobs in zip(all_ids, samplings, wanted, strict=True):
        if sampling is None:
            sampling = GenerateSampling(**rules.defaults)
        request = new_request(rules, sampling, ids, param=param, names=_SGLANG_NAMES)
        logprobs.apply(request, len(ids))
        yield request


def spread(value: Any, count: int, param: str) -> list[Any]:
    """One value for each of `count` prompts. Raises RequestError on a list of another length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise refusal(
            "invalid_value", f"{param} has {len(value)} entries for {count} prompts", param
        )
    return value


@dataclass(frozen=True, slots=True)
class _WantedLogprobs:
    """The three fields of one prompt; `for_any`: those of another one in the call are wanted."""

    wanted: bool | None
    start: int | None
    top: int | None
    for_any: bool

    def apply(self, request: Generate, prompt_length: int) -> None:
        """Raises RequestError."""
        if not self.wanted:
            self._check_unwanted()
            return
        start = -1 if self.start is None else self.start
        if not -1 <= start <= prompt_length:
            raise refusal(
                "invalid_value",
                f"logprob_start_len must be in [-1, {prompt_length}]",
                "logprob_start_len",
            )
        request.return_logprob = True
        request.top_logprobs = self.top or 0
        # The end of the prompt asks for no prompt logprobs, as -1 does.
        request.logprob_start = -1 if start == prompt_length else start

    def _check_unwanted(self) -> None:
        asked = self.start not in (None, -1) or self.top
        if asked and not self.for_any:
            raise refusal(
                "invalid_combination",
                "logprob_start_len and top_logprobs_num need return_logprob",
                "return_logprob",
            )


def _wanted_logprobs(body: GenerateBody, count: int) -> list[_WantedLogprobs]:
    wanted = spread(body.return_logprob, count, "return_logprob")
    starts = spread(body.logprob_start_len, count, "logprob_start_len")
    tops = spread(body.top_logprobs_num, count, "top_logprobs_num")
    return [
        _WantedLogprobs(wanted=wanted[i], start=starts[i], top=tops[i], for_any=any(wanted))
        for i in range(count)
    ]
