"""The request bodies, and how bytes become one of them or an error that names the field."""

# A field is typed below, harmless (changes no output), known but not built (only neutral values
# pass) or unknown.

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from ..errors import RequestError, refusal
from ..sampling_params import SamplingParams

MAX_DEPTH = 32
_MAX_WARNINGS = 10
_EXPLAINED = 64 << 10  # only small bodies are parsed a second time to name a bad number

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Top = Annotated[int, Meta(ge=0, le=20)]


HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention parallel_tool_calls "
    "refusal annotations cache_control log_metrics".split()
)
# Of all routes (what one has built it takes, of whatever kind the others are), with the values
# beside null that pass.
_UNBUILT: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids regex ebnf json_schema guided_json guided_regex guided_choice guided_grammar "
    "structured_outputs structural_tag truncate_prompt_tokens prompt_logprobs lora_path session_params "
    "custom_logit_processor custom_params logits_processors stream_interval beam_width audio prediction "
    "web_search_options chat_template input_ids prompt_embeds input_embeds data_parallel_rank tool_call_id "
    "max_thinking_tokens bootstrap_host bootstrap_port bootstrap_room": (),
    "stop_regex bad_words tools functions tool_calls token_ids_logprob image_data video_data audio_data": (
        [],
    ),
    "best_of length_penalty": (1,),
    "use_beam_search early_stopping return_hidden_states return_token_ids return_tokens_as_token_ids "
    "continue_final_message echo background return_entropy include_obfuscation": (False,),
    "spaces_between_special_tokens add_generation_prompt": (True,),
    "separate_reasoning include_reasoning": (True, False),
    "tool_choice function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "response_format": ({"type": "text"},),
    "verbosity": ("medium",),
    "priority": (0,),
    "suffix": ("",),
}
UNBUILT = {name: neutral for names, neutral in _UNBUILT.items() for name in names.split()}


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(Body, kw_only=True):
    type: str
    text: str


class ChatMessage(Body, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None


ROLES = ("system", "developer", "user", "assistant")
Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]


class TemplateOptions(Body, kw_only=True):
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


class Sampling(SamplingParams, kw_only=True):
    """SamplingParams as clients give them. `default_length`: max_new_tokens if left out, lowered to
    what fits."""

    default_length: ClassVar[int | None] = None
    max_new_tokens: int | None = None
    stop: str | list[str] = []  # type: ignore[assignment]


OPENAI_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class OpenAIBody(Sampling, kw_only=True, rename=OPENAI_NAMES):
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
        self.no_stop_trim |= bool(self.include_stop_str_in_output)
        if self.stream_options is not None and not self.stream:
            raise refusal("invalid_combination", "stream_options needs stream", "stream_options")
        lowest = 0 if getattr(self, "echo", None) else 1
        if self.max_new_tokens is not None and self.max_new_tokens < lowest:
            raise refusal("invalid_value", f"max_tokens must be at least {lowest}", "max_tokens")


class ChatBody(OpenAIBody, kw_only=True):
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
    default_length = 16
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


class NativeSampling(Sampling, kw_only=True):
    """`sampling_params` of /generate; the names are SGLang's."""

    default_length = 128
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        self.seed = self.sampling_seed if self.seed is None else self.seed


class NativeBody(Body, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
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
    model: str | None = None
    prompt: str | list[str] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None


class DetokenizeBody(Body, kw_only=True):
    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


class AbortBody(Body, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as a template takes them, content as one string. Raises RequestError."""
    result = []
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            code = "unsupported_parameter" if message.role == "tool" else "invalid_value"
            raise refusal(code, f"role must be one of {', '.join(ROLES)}", f"messages[{i}].role")
        role = "system" if message.role == "developer" else message.role
        optional = {"name": message.name, "reasoning_content": message.reasoning_content}
        content = _text_of(message.content, f"messages[{i}].content", role == "assistant")
        entry = {"role": role, "content": content, **optional}
        result.append({name: value for name, value in entry.items() if value is not None})
    return result


def _text_of(content: str | list[dict[str, Any]] | None, where: str, is_answer: bool) -> str:
    if content is None and not is_answer:
        raise refusal("missing_field", f"{where} is required", where)
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.get("type") != "text":
            raise refusal(
                "unsupported_parameter",
                "only parts of type text are supported",
                f"{where}[{i}].type",
            )
        if not isinstance(part.get("text"), str):
            raise refusal("invalid_type", "text must be a string", f"{where}[{i}].text")
    return "\n".join(part["text"] for part in content)


# Fields that hold bodies themselves (one, or a list of them).
_NESTED: dict[str, type[msgspec.Struct]] = {
    "stream_options": StreamOptions,
    "messages": ChatMessage,
}
_NESTED |= {
    "content": TextPart,
    "chat_template_kwargs": TemplateOptions,
    "sampling_params": NativeSampling,
}

B = TypeVar("B", bound=msgspec.Struct)


def decode_body(
    kind: type[B], data: bytes, lenient: bool, defaults: Mapping[str, Any]
) -> tuple[B, list[str]]:
    """The body and its warnings (`lenient`: unknown fields warn). `defaults`: of sampling. Raises
    RequestError 400."""
    raw = parse_json(data)
    if not isinstance(raw, dict):
        raise refusal("invalid_type", "the body must be a JSON object")
    warnings: list[str] | None = [] if lenient else None
    try:
        kept = _sift(kind, raw, "", defaults, warnings)
        return msgspec.convert(kept, kind, str_keys=True), warnings or []
    except msgspec.ValidationError as error:
        raise _explain_type(str(error)) from None


def parse_json(data: bytes) -> Any:
    """Raises RequestError: `invalid_type` for a number that is none (NaN, 1e999), else
    `invalid_json`."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise _explain_json(data) from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deep(value):
        raise refusal("invalid_json", f"JSON nested deeper than {MAX_DEPTH}")
    return value


# Whether arrays and objects are nested beyond MAX_DEPTH: level by level, as `value` may have
# millions of parts.
def _is_deep(value: Any) -> bool:
    level = [[value]]
    for _ in range(MAX_DEPTH + 1):
        parts = (part.values() if type(part) is dict else part for part in level)
        level = [child for part in parts for child in part if type(child) in (dict, list)]
    return bool(level)


# `raw` less what is null, harmless, neutral or (with `warnings`) unknown; a wrong type is msgspec's
# to refuse.
def _sift(
    kind: type, raw: Any, path: str, defaults: Mapping[str, Any], warnings: list[str] | None
) -> Any:
    if isinstance(raw, list):
        return [_sift(kind, x, f"{path}[{i}]", defaults, warnings) for i, x in enumerate(raw)]
    if not isinstance(raw, dict) or (
        kind is TextPart and raw.get("type") != "text"
    ):  # refused by its type
        return raw
    kept: dict[str, Any] = dict(defaults) if issubclass(kind, SamplingParams) else {}
    for name, value in raw.items():
        where = f"{path}.{name[:64]}" if path else name[:64]
        if name in kind.__struct_encode_fields__:  # type: ignore[attr-defined]
            if value is not None:
                kept[name] = (
                    _sift(_NESTED[name], value, where, defaults, warnings)
                    if name in _NESTED
                    else value
                )
        elif name in UNBUILT:
            neutral = [(n, type(n) is bool) for n in (None, *UNBUILT[name])]  # True is not 1
            if (value, type(value) is bool) not in neutral:
                raise refusal("unsupported_parameter", f"{where} is not supported", where)
        elif name not in HARMLESS:
            if warnings is None:
                raise refusal("unknown_parameter", f"unknown parameter {where}", where)
            if len(warnings) < _MAX_WARNINGS:
                warnings.append(f"unknown parameter {where} was ignored")
    return kept


_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]*)`")


# msgspec's sentence as ours. One without "got" tells of a bound, not of a type.
def _explain_type(text: str) -> RequestError:
    at = _AT.search(text)
    path = at[1] if at else ""
    if missing := _MISSING.search(text):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return refusal("missing_field", f"{param} is required", param)
    what = (text[: at.start()] if at else text)[:200]
    code = "invalid_type"
    if what == "Expected `array` of length >= 1":
        code = "empty_input"
    elif what.startswith("Expected") and ", got" not in what:
        code = "invalid_value"
    return refusal(code, f"{path}: {what[:1].lower()}{what[1:]}", path or None)


def _explain_json(data: bytes) -> RequestError:
    if len(data) <= _EXPLAINED:
        with suppress(ValueError, RecursionError):
            for path, value in _walk(json.loads(data)):
                if isinstance(value, float) and not math.isfinite(value):
                    return refusal("invalid_type", f"{path}: not a finite number", path)
    return refusal("invalid_json", "the body is not valid JSON")


# Path (its first 64 characters) and value of everything in a small JSON value.
def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, (dict, list)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            where = f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]"
            yield from _walk(child, where.removeprefix(".")[:64])
