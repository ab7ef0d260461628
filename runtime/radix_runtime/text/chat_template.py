"""Chat templates: Jinja sources from a model directory, rendered in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ConfigError, refusal
from ..hub import read_json

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A model's or the operator's Jinja template, rendered in Jinja's immutable sandbox.

    It sees what transformers gives a template: the special tokens, `tools` and `documents` (None),
    `raise_exception`, `strftime_now`, the filter `tojson` and the tag `{% generation %}`.
    `variables` are the names it reads besides those. Raises ConfigError on a syntax error.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        env.filters["tojson"] = _to_json
        env.globals.update(special_tokens)
        env.globals["tools"] = None
        env.globals["documents"] = None
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        try:
            self._template = env.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(env.parse(source)))
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The prompt of a conversation; `options` are further variables of the template.

        Raises RequestError `chat_template_error`, with the template's own message if it has one.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **options
            )
        except TemplateError as error:
            message = f"the chat template refuses these messages: {error.message or ''}"[:200]
        except Exception:  # a template fails as Python does on shapes it does not expect
            message = "the chat template cannot render these messages"
        raise refusal("chat_template_error", message, "messages")


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


def find_template(
    directory: Path, tokenizer_config: Mapping[str, Any], override: str | None
) -> str | None:
    """The source of a directory's chat template, None if it has none.

    Looked for in `override` (a path, if given), chat_template.jinja, tokenizer_config.json and
    chat_template.json, in this order. Raises ConfigError if a file cannot be read.
    """
    file = Path(override).expanduser() if override else directory / "chat_template.jinja"
    if override or file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the chat template: {error}") from error
    found = tokenizer_config.get("chat_template")
    if not found:
        found = read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several templates, each with a name
        templates = {entry.get("name"): entry.get("template") for entry in found}
        found = templates.get("default")
    return found if isinstance(found, str) else None
