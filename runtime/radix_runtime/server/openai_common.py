"""What chat and completions share: parameters, usage, how a choice ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .. import __version__
from ..errors import RequestError
from ..messages import FinishReason, TextDelta
from ..sampling_params import SamplingParams
from .protocol import Body, OpenAIBody
from .submission import Submission

FINGERPRINT = f"radix-{__version__}"
_MAX_NAME = 256

_COPIED = (
    "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "no_stop_trim", "logit_bias",
)  # fmt: skip


def sampling_from(body: Body, defaults: Mapping[str, float | int], **values: Any) -> SamplingParams:
    """SamplingParams of the fields that the client gave (not null), over `defaults`."""
    given = {name: value for name in _COPIED if (value := getattr(body, name, None)) is not None}
    stop = getattr(body, "stop", None)
    if stop is not None:
        given["stop"] = [stop] if isinstance(stop, str) else stop
    values = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(**{**defaults, **given, **values})


def openai_sampling(
    body: OpenAIBody, defaults: Mapping[str, float | int], max_new_tokens: int | None
) -> SamplingParams:
    sampling = sampling_from(body, defaults, min_new_tokens=body.min_tokens)
    sampling.max_new_tokens = max_new_tokens
    if body.include_stop_str_in_output:
        sampling.no_stop_trim = True
    return sampling


def check_stream_options(body: OpenAIBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            400, "invalid_combination", "stream_options needs stream", param="stream_options"
        )


def cache_key(body: Any) -> str | None:
    """Requests share cached prefixes only under the same key."""
    parts = [part for part in (body.cache_salt, body.extra_key) if part is not None]
    for name in ("cache_salt", "extra_key"):
        check_name(getattr(body, name), name)
    return "\x1f".join(parts) if parts else None


def check_name(value: str | None, param: str) -> None:
    if value is not None and not 1 <= len(value) <= _MAX_NAME:
        raise RequestError(
            400, "invalid_value", f"{param} must have 1 to {_MAX_NAME} characters", param=param
        )


def finish_of(finish: FinishReason | None) -> dict[str, Any]:
    """`matched_stop` is the id or the string that ended the choice, else null."""
    return {
        "finish_reason": None if finish is None else finish.type,
        "matched_stop": None if finish is None else finish.matched,
    }


class Usage:
    """Tokens of one HTTP call. A prompt counts once, however many choices it has."""

    def __init__(self, submission: Submission) -> None:
        self._prompt = sum(submission.prompt_lengths)
        self._prompt_of = submission.prompt_of
        self._cached: dict[int, int] = {}
        self._completion = [0] * len(submission.prompt_of)

    def add(self, deltas: Iterable[tuple[int, TextDelta]]) -> None:
        for choice, delta in deltas:
            # The first choice of a prompt to start tells what the cache gave to the prompt; the
            # others find it there by design.
            self._cached.setdefault(self._prompt_of[choice], delta.cached_tokens)
            self._completion[choice] = delta.completion_tokens

    def object(self) -> dict[str, Any]:
        completion = sum(self._completion)
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": completion,
            "total_tokens": self._prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
