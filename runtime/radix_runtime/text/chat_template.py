"""Chat templates: Jinja sources from a model directory, rendered in a sandbox."""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ConfigError, refusal
from ..gguf import is_gguf
from ..hub import model_json

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A model's or the operator's Jinja template, rendered in Jinja's immutable sandbox.

    It sees what transformers gives a template: the special tokens, `tools` (None without),
    `documents` (None), `raise_exception`, `strftime_now`, the filter `tojson` and the tag
    `{% generation %}`. `source` is its text. `takes_tools`: it writes tools into the prompt.
    `tool_source` is that of a second template, for conversations with tools; None: this one takes
    them, too. Raises ConfigError on a syntax error.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        env.filters["tojson"] = _to_json
        env.globals.update(special_tokens)
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        try:
            self._template = env.from_string(source)
            names = meta.find_undeclared_variables(env.parse(source))
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
        self.source = source
        self.special_tokens = special_tokens
        self.takes_tools = "tools" in names
        self._variables = frozenset(names - _GIVEN)
        self.tool_source = tool_source
        self._for_tools: ChatTemplate | None = None
        if tool_source is not None:
            self._for_tools = ChatTemplate(tool_source, special_tokens)
            self.takes_tools = self._for_tools.takes_tools

    def variables(self, *, with_tools: bool) -> frozenset[str]:
        """The names that the template of a conversation reads besides what any may: the one for
        conversations with tools may read others."""
        if with_tools and self._for_tools is not None:
            return self._for_tools._variables
        return self._variables

    @property
    def text(self) -> str:
        """What shows how its model writes: the sources of both templates."""
        return self.source + (self.tool_source or "")

    @cached_property
    def _takes_text(self) -> bool:
        """Whether it writes the arguments of a call only if they are text."""
        try:
            self._template.render(messages=_EXAMPLE, add_generation_prompt=True, tools=None)
        except TemplateError:
            return False
        except Exception:  # it adds them to a text
            return True
        return False

    def _adapted(self, messages: Messages) -> Messages:
        """The messages with calls and reasoning in the form that this template takes."""
        if any("tool_calls" in message for message in messages) and self._takes_text:
            messages = _with_text(messages)
        if _THINKING in self.source:
            messages = _with_thinking(messages)
        return messages

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The prompt of a conversation; `options` are further variables of the template. With
        `continue_final_message` it ends with the content of the last message, in place of what
        begins another.

        Raises RequestError `chat_template_error`, with the template's own message if it has one.
        """
        if continue_final_message:
            return self._until_final(messages, tools=tools, **options)
        if self._for_tools is not None and tools is not None:
            return self._for_tools.render(
                messages, add_generation_prompt=add_generation_prompt, tools=tools, **options
            )
        try:
            return self._template.render(
                messages=self._adapted(messages),
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **options,
            )
        except TemplateError as error:
            message = f"the chat template refuses these messages: {error.message or ''}"[:200]
        except MemoryError:
            raise
        except Exception:  # a template fails as Python does on shapes it does not expect
            message = "the chat template cannot render these messages"
        raise refusal("chat_template_error", message, "messages")

    def _until_final(self, messages: Messages, **options: Any) -> str:
        """The prompt up to the end of the last message's content, which ends without spaces where
        the template takes them away."""
        *before, last = messages
        mark = secrets.token_hex(16)  # which no message can have
        marked = {**last, "content": f"{last['content']}{mark} "}
        text = self.render([*before, marked], add_generation_prompt=False, **options)
        prompt, found, rest = text.rpartition(mark)
        if not found:
            message = "the chat template does not write the final message as it is"
            raise refusal("chat_template_error", message, "messages")
        return prompt if rest.startswith(" ") else prompt.rstrip()


# What `render` gives a template itself.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
_EXAMPLE = (  # a conversation with a call
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "f", "arguments": {"a": 1}},
            }
        ],
    },
    {"role": "tool", "content": "1", "tool_call_id": "call00000"},
)


def _with_text(messages: Messages) -> Messages:
    """The messages with the arguments of calls as JSON texts."""
    found = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if not isinstance(function["arguments"], str):
                function = {**function, "arguments": _to_json(function["arguments"])}
            calls.append({**call, "function": function})
        found.append({**message, "tool_calls": calls} if calls else message)
    return found


_THINKING = "message.thinking"  # as gpt-oss calls reasoning, which it takes beside calls alone


def _with_thinking(messages: Messages) -> Messages:
    found = []
    for message in messages:
        thought = message.get("reasoning_content")
        if thought and message.get("tool_calls") and not message["content"]:
            message = {**message, "thinking": thought}
        found.append(message)
    return found


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class TemplateSources(NamedTuple):
    """The sources of a model's chat template, and of its second one for conversations with tools;
    None where there is none. `file`: where they stand."""

    default: str | None
    tool_use: str | None = None
    file: Path | None = None


def find_templates(
    directory: Path, tokenizer_config: Mapping[str, Any], override: str | None
) -> TemplateSources:
    """Those of a directory. Looked for in `override` (a path, if given), chat_template.jinja with
    additional_chat_templates/tool_use.jinja, tokenizer_config.json and chat_template.json, in this
    order. Raises ConfigError if a file cannot be read."""
    if override:
        file = Path(override).expanduser()
        return TemplateSources(default=_read(file), file=file)
    file = directory / "chat_template.jinja"
    if file.is_file():
        second = directory / "additional_chat_templates" / "tool_use.jinja"
        tool_use = _read(second) if second.is_file() else None
        return TemplateSources(default=_read(file), tool_use=tool_use, file=file)
    found = tokenizer_config.get("chat_template")
    file = directory if is_gguf(directory) else directory / "tokenizer_config.json"
    if not found:
        file = directory / "chat_template.json"
        found = model_json(directory, file.name).get("chat_template")
    named = {"default": found}
    if isinstance(found, list):  # several templates, each with a name
        named = {entry.get("name"): entry.get("template") for entry in found}
    default, tool_use = (named.get(name) for name in ("default", "tool_use"))
    return TemplateSources(
        default=default if isinstance(default, str) else None,
        tool_use=tool_use if isinstance(tool_use, str) else None,
        file=file,
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot read the chat template: {error}") from error
