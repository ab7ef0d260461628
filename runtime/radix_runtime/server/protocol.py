"""The request bodies, and how bytes become one of them or an error that names the field.

A field is built (typed below), harmless (accepted, changes no output), or known but not built
(`unbuilt`: only its neutral values pass). Everything else is unknown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from ..errors import RequestError, refusal

MAX_DEPTH = 32
MAX_MESSAGES = 4096
_MAX_WARNINGS = 10
_EXPLAINED = 64 << 10  # only small bodies are parsed a second time to name a bad number

Neutral = Mapping[str, tuple[Any, ...]]


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`nested`: fields that hold bodies themselves (one, or a list of them). `unbuilt`: the values
    beside null that ask for nothing."""

    harmless: ClassVar[frozenset[str]] = frozenset()
    unbuilt: ClassVar[Neutral] = {}
    nested: ClassVar[Mapping[str, type[Body]]] = {}


def _never(names: str) -> Neutral:
    """Fields of which only null passes."""
    return dict.fromkeys(names.split(), ())


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    unbuilt: ClassVar[Neutral] = {"include_obfuscation": (False,)}


class ChatMessage(Body, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None

    harmless: ClassVar[frozenset[str]] = frozenset({"refusal", "annotations"})
    unbuilt: ClassVar[Neutral] = {
        **_never("function_call tool_call_id audio"),
        "tool_calls": ([],),
    }


class TemplateOptions(Body, kw_only=True):
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


class Sampling(Body, kw_only=True):
    """The sampling fields that every route calls the same."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[int, float] | None = None


class OpenAIBody(Sampling, kw_only=True):
    """What chat and completions share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None

    harmless: ClassVar[frozenset[str]] = frozenset(
        "user metadata store service_tier safety_identifier prompt_cache_key "
        "prompt_cache_retention parallel_tool_calls".split()
    )
    unbuilt: ClassVar[Neutral] = {
        **_never(
            "allowed_token_ids regex ebnf json_schema guided_json guided_regex guided_choice "
            "guided_grammar structured_outputs truncate_prompt_tokens prompt_logprobs lora_path "
            "session_params custom_logit_processor logits_processors"
        ),
        **dict.fromkeys(("stop_regex", "bad_words"), ([],)),
        **dict.fromkeys(("best_of", "length_penalty"), (1,)),
        **dict.fromkeys(
            (
                "use_beam_search", "early_stopping", "return_hidden_states", "return_token_ids",
                "return_tokens_as_token_ids",
            ),
            (False,),
        ),
        "spaces_between_special_tokens": (True,),
        "priority": (0,),
        "response_format": ({"type": "text"},),
    }  # fmt: skip
    nested: ClassVar[Mapping[str, type[Body]]] = {"stream_options": StreamOptions}


class ChatBody(OpenAIBody, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateOptions | None = None

    unbuilt: ClassVar[Neutral] = {
        **OpenAIBody.unbuilt,
        **_never("audio prediction web_search_options chat_template input_ids"),
        **dict.fromkeys(("tools", "functions"), ([],)),
        **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
        **dict.fromkeys(("continue_final_message", "echo"), (False,)),
        **dict.fromkeys(("separate_reasoning", "include_reasoning"), (True, False)),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "add_generation_prompt": (True,),
    }
    nested: ClassVar[Mapping[str, type[Body]]] = {
        "stream_options": StreamOptions,
        "messages": ChatMessage,
        "chat_template_kwargs": TemplateOptions,
    }


class CompletionBody(OpenAIBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    unbuilt: ClassVar[Neutral] = {**OpenAIBody.unbuilt, "suffix": ("",), "prompt_embeds": ()}


class NativeSampling(Sampling, kw_only=True):
    """`sampling_params` of /generate; the names are SGLang's."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None

    unbuilt: ClassVar[Neutral] = {
        **_never("json_schema regex ebnf structural_tag custom_params stream_interval beam_width"),
        "stop_regex": ([],),
        "spaces_between_special_tokens": (True,),
    }


class NativeBody(Body, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    incremental_streaming_output: bool | None = None
    extra_key: str | None = None
    cache_salt: str | None = None

    harmless: ClassVar[frozenset[str]] = frozenset({"log_metrics", "user"})
    unbuilt: ClassVar[Neutral] = {
        **_never(
            "input_embeds lora_path session_params custom_logit_processor data_parallel_rank "
            "max_thinking_tokens bootstrap_host bootstrap_port bootstrap_room"
        ),
        **dict.fromkeys(
            ("token_ids_logprob", "image_data", "video_data", "audio_data", "modalities"), ([],)
        ),
        **dict.fromkeys(("return_hidden_states", "background", "return_entropy"), (False,)),
        "priority": (0,),
    }
    nested: ClassVar[Mapping[str, type[Body]]] = {"sampling_params": NativeSampling}


class TokenizeBody(Body, kw_only=True):
    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateOptions | None = None

    unbuilt: ClassVar[Neutral] = {"tools": ([],), "chat_template": ()}
    nested: ClassVar[Mapping[str, type[Body]]] = {
        "messages": ChatMessage,
        "chat_template_kwargs": TemplateOptions,
    }


class DetokenizeBody(Body, kw_only=True):
    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


class AbortBody(Body, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None


B = TypeVar("B", bound=Body)


def decode_body(kind: type[B], data: bytes, *, lenient: bool) -> tuple[B, list[str]]:
    """The body and its warnings (`lenient`: unknown fields warn). Raises RequestError 400."""
    raw = parse_json(data)
    warnings: list[str] = []
    if not isinstance(raw, dict):
        raise refusal("invalid_type", "the body must be a JSON object")
    try:
        kept = _sift(kind, raw, "", lenient, warnings)
        return msgspec.convert(kept, kind, str_keys=True), warnings
    except msgspec.ValidationError as error:
        raise _explain_type(str(error)) from None


def parse_json(data: bytes) -> Any:
    """Raises RequestError: `invalid_type` for a number that is none (NaN, 1e999), else
    `invalid_json`."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise _explain_json(data) from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise refusal("invalid_json", f"JSON nested deeper than {MAX_DEPTH}")
    return value


def _sift(
    kind: type[Body], raw: dict[str, Any], path: str, lenient: bool, warnings: list[str]
) -> dict[str, Any]:
    """`raw` less what is harmless, neutral or (lenient) unknown."""
    kept: dict[str, Any] = {}
    built = kind.__struct_fields__
    for name, value in raw.items():
        where = f"{path}{name[:64]}"
        if name in built:
            nested = kind.nested.get(name)
            kept[name] = _sift_nested(nested, value, where, lenient, warnings) if nested else value
        elif name in kind.unbuilt:
            if value is not None and not any(_same(value, n) for n in kind.unbuilt[name]):
                raise refusal("unsupported_parameter", f"{where} is not supported", where)
        elif name not in kind.harmless:
            if not lenient:
                raise refusal("unknown_parameter", f"unknown parameter {where}", where)
            if len(warnings) < _MAX_WARNINGS:
                warnings.append(f"unknown parameter {where} was ignored")
    return kept


def _sift_nested(
    kind: type[Body], value: Any, where: str, lenient: bool, warnings: list[str]
) -> Any:
    if isinstance(value, dict):
        return _sift(kind, value, f"{where}.", lenient, warnings)
    if isinstance(value, list):
        return [
            _sift_nested(kind, item, f"{where}[{i}]", lenient, warnings)
            for i, item in enumerate(value)
        ]
    return value


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]*)`")


def _explain_type(text: str) -> RequestError:
    at = _AT.search(text)
    path = at[1] if at else ""
    if missing := _MISSING.search(text):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return refusal("missing_field", f"{param} is required", param)
    what = (text[: at.start()] if at else text)[:200]
    what = what[:1].lower() + what[1:]
    return refusal("invalid_type", f"{path}: {what}", path or None)


def _explain_json(data: bytes) -> RequestError:
    if len(data) <= _EXPLAINED:
        try:
            path = _non_finite(json.loads(data))
        except (ValueError, RecursionError):
            path = None
        if path is not None:
            return refusal("invalid_type", f"{path[:64]}: not a finite number", path[:64])
    return refusal("invalid_json", "the body is not valid JSON")


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f".{key}", child) for key, child in value.items()]
    if isinstance(value, list):
        return [(f"[{i}]", child) for i, child in enumerate(value)]
    return []


def _non_finite(value: Any) -> str | None:
    """Path of a NaN or an infinity in `value`."""
    stack = [("", value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return path.removeprefix(".")
        stack += [(path + step, child) for step, child in _children(item)]
    return None


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level:
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        deepest += 1
    return deepest
