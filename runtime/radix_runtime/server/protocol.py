"""The request bodies: the fields that are built, and what they must fulfil together."""

# decode.py makes them of bytes; unbuilt.py has the fields that no body has built.

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from ..errors import refusal
from ..sampling_params import SamplingParams
from ..text.conversation import ChatMessage

MAX_PROMPTS = 256  # of one call
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Top = Annotated[int, Meta(ge=0, le=20)]


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object of a client. `None` means left out."""


class StreamOptions(Body, kw_only=True):
    """`stream_options`: usage in a frame at the end, or in every frame."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]


class TemplateOptions(Body, kw_only=True):
    """`chat_template_kwargs`: the variables of a chat template that clients may set."""

    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


class Sampling(SamplingParams, kw_only=True):
    """SamplingParams as clients give them. `default_length` is max_new_tokens where it is left out,
    lowered to what fits; None: to the end of the context."""

    default_length: ClassVar[int | None] = None
    max_new_tokens: int | None = None
    stop: str | list[str] = []  # type: ignore[assignment]


OPENAI_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class OpenAIBody(Sampling, kw_only=True, rename=OPENAI_NAMES):
    """What /v1/chat/completions and /v1/completions share. `lowest_length`: of max_tokens."""

    lowest_length: ClassVar[int] = 1
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    model: str | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: Name | None = None
    cache_salt: Name | None = None
    extra_key: Name | None = None

    def __post_init__(self) -> None:
        if self.include_stop_str_in_output:
            self.no_stop_trim = True
        if self.stream_options is not None and not self.stream:
            raise refusal("invalid_combination", "stream_options needs stream", "stream_options")
        lowest = self.lowest_length
        if self.max_new_tokens is not None and self.max_new_tokens < lowest:
            raise refusal("invalid_value", f"max_tokens must be at least {lowest}", "max_tokens")


class ChatBody(OpenAIBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateOptions | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise refusal("invalid_combination", "top_logprobs needs logprobs", "top_logprobs")
        if self.max_completion_tokens is not None:
            if self.max_new_tokens not in (None, self.max_completion_tokens):
                raise refusal(
                    "invalid_combination",
                    "max_tokens and max_completion_tokens differ",
                    "max_tokens",
                )
            self.max_new_tokens = self.max_completion_tokens


class CompletionBody(OpenAIBody, kw_only=True):
    """POST /v1/completions. Its max_tokens may be 0: the prompt is computed, nothing is added."""

    default_length = 16
    lowest_length = 0
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


class GenerateSampling(Sampling, kw_only=True):
    """`sampling_params` of /generate; the names are SGLang's."""

    default_length = 128
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        if self.seed is None:
            self.seed = self.sampling_seed


class GenerateBody(Body, kw_only=True):
    """POST /generate. A list has one value for each prompt."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateSampling | list[GenerateSampling] | None = None
    rid: Name | list[Name] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: Top | list[Top] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    incremental_streaming_output: bool | None = None
    extra_key: Name | None = None
    cache_salt: Name | None = None


class TokenizeBody(Body, kw_only=True):
    """POST /tokenize: a prompt as /v1/completions has it, or messages as the chat has them."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None


class DetokenizeBody(Body, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


class AbortBody(Body, kw_only=True):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None


class ProfileBody(Body, kw_only=True):
    """POST /start_profile and /stop_profile: nothing can be chosen."""


def require_one_of(body: Body, first: str, second: str) -> str:
    """Which of two fields the client gave. Raises RequestError unless it is exactly one."""
    given = [name for name in (first, second) if getattr(body, name) is not None]
    if len(given) != 1:
        code = "invalid_combination" if given else "missing_field"
        raise refusal(code, f"exactly one of {first} and {second} is needed", first)
    return given[0]
