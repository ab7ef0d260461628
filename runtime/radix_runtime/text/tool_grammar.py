"""Grammars of tool calls: an answer that must call, or whose calls must obey their schemas."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import refusal
from .answer_grammar import AnswerGrammar, quoted
from .json_schema import normalise
from .tool_parsers.form import CallForm
from .tools import ToolSpec, ToolUse, json_types

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What a text between tags may be told of; everything else about it cannot be kept.
_TEXT_KEYS = frozenset(
    {"type", "enum", "const", "description", "title", "default", "examples", "format"}
)


class ToolGrammar(AnswerGrammar):
    """AnswerGrammar of a family that writes calls in `form`."""

    def __init__(
        self,
        form: CallForm,
        markers: Iterable[str],
        special_id: Callable[[str], int | None],
    ) -> None:
        super().__init__(markers, special_id)
        self._form = form

    def required(self, use: ToolUse, *, schema: Any = None, final: str = "") -> str:
        """An answer that consists of calls. With `schema` it may be JSON of that instead, behind
        the text `final`."""
        calls = self._rule(self._section(use))
        if schema is not None:
            calls = f"({calls} | {self._text(final)} {self._json(schema)})"
        return self._grammar(calls)

    def strict(self, use: ToolUse) -> str:
        """Free text with calls that obey their schemas."""
        form = self._form
        if not form.opening:
            calls = self._rule(self._section(use))
            free = f"{self._text(form.free)} ANY_TEXT" if form.free else "NO_BRACE"
            self._rules.append("NO_BRACE: /([^{](.|\\n)*)?/")
            return self._grammar(f"{calls} | {free}")
        head = self._lazy(form.opening)
        if form.section:
            rest = self._text(form.section[len(form.opening) :])
            one = self._rule(f"{head} {rest} {self._calls(use)} {self._text(form.section_end)}")
        else:
            call = self._alternatives(use, form.call[len(form.opening) :])
            one = self._rule(f"{head} {call}")
        count = "*" if use.is_parallel else "?"
        return self._grammar(f"{one}{count} ANY_TEXT")

    # Calls --------------------------------------------------------------------------------

    def _section(self, use: ToolUse) -> str:
        form = self._form
        return f"{self._text(form.section)} {self._calls(use)} {self._text(form.section_end)}"

    def _calls(self, use: ToolUse) -> str:
        """One call, or several."""
        call = self._alternatives(use, self._form.call)
        if not use.is_parallel:
            return call
        return f"{call} ({self._text(self._form.separator)} {call})*"

    def _alternatives(self, use: ToolUse, beginning: str) -> str:
        """A call of any of the tools that may be called."""
        tools = [tool for tool in use.tools if use.forced in (None, tool.function.name)]
        return self._rule(" | ".join(self._call(tool, beginning) for tool in tools))

    def _call(self, tool: ToolSpec, beginning: str) -> str:
        form = self._form
        name = tool.function.name
        pieces = [self._text(beginning.replace("{name}", name))]
        if form.number:
            pieces.append(f"/{form.number}/")
        pieces.append(self._text(form.call_rest))
        schema = _closed(tool.function.parameters or {})
        pieces.append(self._tagged(schema, name) if form.value_end else self._json(schema))
        pieces.append(self._text(form.call_end))
        return self._rule(" ".join(pieces))

    def _tagged(self, schema: Mapping[str, Any], name: str) -> str:
        """The arguments one by one, in the order of the schema."""
        required = schema.get("required", [])
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        pieces = []
        for key, value in schema["properties"].items():
            head = self._text(self._form.key.replace("{key}", key))
            written = self._rule(f"{head} {self._value(key, value, shared, name)}")
            pieces.append(written if key in required else f"({written})?")
        return " ".join(pieces)

    def _value(self, key: str, schema: Any, shared: Mapping[str, Any], name: str) -> str:
        """A value and its end: a text as it is, or JSON."""
        types = json_types(schema)
        given = schema if isinstance(schema, Mapping) else {}
        unkept = sorted(set(given) - _TEXT_KEYS)
        if types - {"string"} or (unkept and not types):
            return f"{self._json({**shared, **given})} {self._value_end()}"
        if unkept:
            place = f"/properties/{key}/{unkept[0]}"
            message = f"{name}: {place} cannot be kept in the format of this model's calls"
            raise refusal("unsupported_schema", message, place)
        values = [given["const"]] if "const" in given else given.get("enum")
        if values is None:
            return self._lazy(self._form.value_end)
        texts = " | ".join(quoted(str(value)) for value in values)
        return f"({texts}) {self._value_end()}"

    def _value_end(self) -> str:
        return self._text(self._form.before_end + self._form.value_end)

    def _json(self, schema: Any) -> str:
        normal = normalise(schema).schema
        return f"%json {json.dumps({**normal, 'x-guidance': _JSON_STYLE})}"


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of arguments: an object that has no members but those that are named, unless the
    schema says otherwise."""
    closed: dict[str, Any] = {"type": "object", "properties": {}, **schema}
    closed.setdefault("additionalProperties", False)
    return closed
