"""The request bodies: the fields that are built, and what they must fulfil together."""

# decode.py makes them of bytes; unbuilt.py has the fields that no body has built.

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ..constraint import ConstrainedParams, Constraint, ResponseFormat, StructuredOutputs
from ..errors import refusal
from ..text.conversation import ChatMessage
from ..text.tools import ToolSpec

MAX_PROMPTS = 256  # of one call
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Top = Annotated[int, Meta(ge=0, le=20)]


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object of a client. `None` means left out. `nested` are the types of the fields that
    hold such an object, or a list of them."""

    nested: ClassVar[Mapping[str, type]] = {}


class StreamOptions(Body, kw_only=True):
    """`stream_options`: usage in a frame at the end, or in every frame."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]


class TemplateOptions(Body, kw_only=True):
    """`chat_template_kwargs`: the variables of a chat template that clients may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: str | None = None


class Sampling(ConstrainedParams, kw_only=True):
    """ConstrainedParams as clients give them. `default_length` is max_new_tokens where it is left
    out, lowered to what fits; None: to the end of the context."""

    nested: ClassVar[Mapping[str, type]] = {"structured_outputs": StructuredOutputs}
    default_length: ClassVar[int | None] = None
    max_new_tokens: int | None = None
    stop: str | list[str] = []  # type: ignore[assignment]


OPENAI_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class OpenAIBody(Sampling, kw_only=True, rename=OPENAI_NAMES):
    """What /v1/chat/completions and /v1/completions share. `lowest_length`: of max_tokens."""

    nested = {
        **Sampling.nested,
        "stream_options": StreamOptions,
        "response_format": ResponseFormat,
    }
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
    response_format: ResponseFormat | None = None
    prompt_logprobs: Top | None = None

    def __post_init__(self) -> None:
        if self.include_stop_str_in_output:
            self.no_stop_trim = True
        if self.stream_options is not None and not self.stream:
            raise refusal("invalid_combination", "stream_options needs stream", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs are not available when stream=true"
            raise refusal("invalid_combination", message, "prompt_logprobs")
        lowest = self.lowest_length
        if self.max_new_tokens is not None and self.max_new_tokens < lowest:
            raise refusal("invalid_value", f"max_tokens must be at least {lowest}", "max_tokens")

    def constraints(self) -> Iterator[Constraint]:
        """Every constraint that is set. Raises RequestError."""
        if self.response_format is not None:
            yield from self.response_format.constraints()
        yield from super().constraints()


def check_continuing(continues: bool | None, begins_anew: bool | None) -> None:
    """Raises RequestError where continue_final_message and add_generation_prompt contradict each
    other: an answer continues the last message, or begins one."""
    if continues and begins_anew:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise refusal("invalid_combination", message, "add_generation_prompt")


class ChatBody(OpenAIBody, kw_only=True):
    """POST /v1/chat/completions."""

    nested = {
        **OpenAIBody.nested,
        "messages": ChatMessage,
        "tools": ToolSpec,
        "chat_template_kwargs": TemplateOptions,
    }
    messages: Messages
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateOptions | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_continuing(self.continue_final_message, self.add_generation_prompt)
        if self.add_generation_prompt is False and not self.continue_final_message:
            message = "it needs continue_final_message: else an answer begins a message"
            raise refusal("unsupported_parameter", message, "add_generation_prompt")
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
    add_special_tokens: bool | None = None


class GenerateSampling(Sampling, kw_only=True):
    """`sampling_params` of /generate; the names are SGLang's."""

    default_length = 128
    path = "sampling_params."
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        if self.seed is None:
            self.seed = self.sampling_seed


class GenerateBody(Body, kw_only=True):
    """POST /generate. A list has one value for each prompt."""

    nested = {"sampling_params": GenerateSampling}
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


class AgentBody(Sampling, kw_only=True):
    """What /v1/responses and /v1/messages share: one choice, and no state between calls."""

    model: str | None = None
    stream: bool | None = None
    rid: Name | None = None
    cache_salt: Name | None = None
    extra_key: Name | None = None
    chat_template_kwargs: TemplateOptions | None = None

    def __post_init__(self) -> None:
        if self.n != 1:
            raise refusal("unsupported_parameter", "this route gives one answer", "n")


class Reasoning(Body, kw_only=True):
    """`reasoning` of /v1/responses. Reasoning is never summarized."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Body, kw_only=True):
    """`text.format` of /v1/responses. `strict` changes nothing: every schema is kept."""

    nested = {}
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class TextOptions(Body, kw_only=True):
    """`text` of /v1/responses."""

    nested = {"format": TextFormat}
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ObfuscationOptions(Body, kw_only=True):
    """`stream_options` of /v1/responses: events are not padded."""

    include_obfuscation: Literal[False] | None = None


Items = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]


RESPONSES_NAMES = {"max_new_tokens": "max_output_tokens"}


class ResponsesBody(AgentBody, kw_only=True, rename=RESPONSES_NAMES):
    """POST /v1/responses. Items, tools and the choice of tools are read by responses_input.py."""

    nested = {
        **AgentBody.nested,
        "reasoning": Reasoning,
        "text": TextOptions,
        "stream_options": ObfuscationOptions,
        "chat_template_kwargs": TemplateOptions,
    }
    max_new_tokens: int | None = None
    input: str | Items
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    store: bool | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    stream_options: ObfuscationOptions | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.store:
            raise refusal("unsupported_parameter", "answers are not stored", "store")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            message = "max_output_tokens must be at least 1"
            raise refusal("invalid_value", message, "max_output_tokens")

    def constraints(self) -> Iterator[Constraint]:
        """Every constraint that is set. Raises RequestError."""
        form = None if self.text is None else self.text.format
        if form is not None and form.type == "json_object":
            yield Constraint(kind="json_object", param="text.format")
        elif form is not None and form.type == "json_schema":
            if form.schema is None:
                where = "text.format.schema"
                raise refusal("missing_field", f"{where} is required", where)
            schema = msgspec.json.encode(form.schema).decode()
            yield Constraint(kind="json_schema", text=schema, param="text.format.schema")
        yield from super().constraints()


class Thinking(Body, kw_only=True):
    """`thinking` of /v1/messages."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(Body, kw_only=True):
    """`output_config.format` of /v1/messages."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Body, kw_only=True):
    """`output_config` of /v1/messages."""

    nested = {"format": OutputFormat}
    effort: str | None = None
    format: OutputFormat | None = None


MESSAGES_NAMES = {"max_new_tokens": "max_tokens", "stop": "stop_sequences"}


class CountBody(AgentBody, kw_only=True, rename=MESSAGES_NAMES):
    """POST /v1/messages/count_tokens. Messages and tools are read by anthropic_input.py."""

    nested = {
        **AgentBody.nested,
        "thinking": Thinking,
        "output_config": OutputConfig,
        "chat_template_kwargs": TemplateOptions,
    }
    max_new_tokens: int | None = None
    stop: str | list[str] = []  # type: ignore[assignment]
    messages: Items
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def constraints(self) -> Iterator[Constraint]:
        """Every constraint that is set. Raises RequestError."""
        form = None if self.output_config is None else self.output_config.format
        if form is not None:
            schema = msgspec.json.encode(form.schema).decode()
            yield Constraint(kind="json_schema", text=schema, param="output_config.format.schema")
        yield from super().constraints()


class MessagesBody(CountBody, kw_only=True, rename=MESSAGES_NAMES):
    """POST /v1/messages."""

    max_new_tokens: Annotated[int, Meta(ge=1)]


class TokenizeBody(Body, kw_only=True):
    """POST /tokenize: a prompt as /v1/completions has it, or messages as the chat has them."""

    nested = {
        "messages": ChatMessage,
        "tools": ToolSpec,
        "chat_template_kwargs": TemplateOptions,
    }
    model: str | None = None
    prompt: str | list[str] | None = None
    messages: Messages | None = None
    tools: list[ToolSpec] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None


class DetokenizeBody(Body, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


class AbortBody(Body, kw_only=True):
    """POST /abort_request."""

    rid: Name | None = None
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
